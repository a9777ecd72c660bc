"""LIBERO: five suites of household tasks for a Panda arm, 130 in all, in robosuite and MuJoCo."""
