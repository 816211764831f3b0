"""Advice where no plan fits: the smallest change that is known to help.

infeasible   what to say, and to try, when nothing fits
relaxations  changes of a job and its cluster, the cheapest first
tries        what was tried, for the message
first_fit    a plan that fits, however slow
settings     a placement found under other settings, written for the job's own
more_room    a structure in which all layers find room, by moves
"""
