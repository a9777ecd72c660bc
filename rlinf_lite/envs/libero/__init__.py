"""LIBERO: 130 household tasks for a Panda arm, in five suites, simulated by robosuite and MuJoCo."""
