"""Exact search for small problems: every structure, with proof.

exact       the best plan, and what its proof relaxes
exhaustive  every placement of a small problem
structures  every way to form pipelines
prune       fillings that may fit and are not beaten
"""
