"""Prices of placements: the scoreboard, and the order in which candidates rank.

scoreboard      price, cache, best so far, progress
candidate       a priced placement, and how candidates rank
rescore         the best, priced with queues on shared paths
tail            gradient exchange and contended paths, estimated
canonical       one form for placements that differ in numbers only
replica_shapes  what of a replica its price depends on
out_of_memory   placements that lack memory
unlike          placements that differ
ladder          structures on their way from estimates to events
starts          structures to start a search from
"""
