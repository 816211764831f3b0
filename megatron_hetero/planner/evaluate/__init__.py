"""Prices of placements: the scoreboard, and the order in which candidates rank.

scoreboard      price, cache, best so far, progress
candidate       a priced placement, and how candidates rank
rescore         the best, priced with queues on shared paths
tail            gradient exchange and contended paths, estimated
canonical       one form for placements that differ only in the numbers of equal things
hanging         placements that no job could run
out_of_memory   placements that lack memory
ladder          structures on their way from estimates to simulated steps
rungs           what completes, prices, tunes and simulates them
written         a placement as a plan
sites           the exchange of gradients kept inside sites
"""
