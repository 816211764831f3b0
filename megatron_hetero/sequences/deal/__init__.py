"""The deal of sequences to groups.

dealt             a deal as data, and its check
price_table       prices of a batch as arrays
batch             the deal of a step
micro_batch       the deal of a micro-batch, with its bound
programme         can it be done within a time? numbers of groups and sequences
patterns          the same for few sequences: the sets that a group takes
buckets           sequences of almost one length, counted together
solution_packing  sequences packed as a solution of the programme says
packing           sequences in groups, moved and exchanged
greedy            the deal that needs no solver
static            the deal that a fixed degree gives
"""
