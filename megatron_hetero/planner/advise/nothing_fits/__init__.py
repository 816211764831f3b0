"""Advice where no plan fits: the smallest change that is known to help.

infeasible   what to say, and to try, when nothing fits
relaxations  changes of a job and its cluster, the cheapest first
tries        what was tried, for the message
"""
