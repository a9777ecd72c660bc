"""Tabletop: a small vectorised world for vision-language-action policies, written in NumPy only.

A robot's end effector moves over a table with coloured blocks and squares, seen from above, and follows an instruction.
There are three families of tasks: pick up a block, push it onto a square, put it left or right of another block.
"""
