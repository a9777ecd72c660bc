"""MetaWorld v3: 50 tasks of a Sawyer arm at a table, in MuJoCo."""
