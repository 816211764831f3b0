"""Other systems' cost models, written from their formulas: yardsticks for plans, never our prices.

Each referee is two files: the formulas, which score a plan, and the same prices in the form of a
`CostModel`, so that our planner optimises what is scored (a test holds both equal).

Two others are no prices but searches, written without ours: `plain_enumeration` under Sailor's
prices, whose clusters `drawn_cases` makes up, and `annealing` under our own.
"""
