"""Tabletop: a small vectorised world for vision-language-action policies, in NumPy alone.

A robot's end effector moves over a table with coloured blocks and squares, seen from above, and an instruction says
what to do. Three families of tasks: pick up a block, push it onto a square, put it beside another block.
"""
