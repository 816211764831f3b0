"""The composition of a fleet: how many replicas of which kind, and what each serves.

problem    replicas on offer, machines, requests; an answer and its rules
milp       the answer, by one mixed integer programme in rates
milp_rows  columns and rows of the programme
"""
