"""Objectives of a search: time, money or GPUs, and limits that a plan has to keep.

objective        the measure that plans are compared by, and limits of time and money
objective_bound  lower bounds of the other objectives
outcome          what a plan means for a whole run
"""
