"""Libraries and communicators of a plan's machines and ranks.

libraries      the communication library of a plan's machines
communicators  ranks that make a communicator together
under_way      messages of a boundary that are under way at a time
"""
