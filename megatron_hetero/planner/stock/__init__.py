"""The best plan that stock Megatron can run.

search         all that its flags can say
items          what waits in the search, with its bound
limits         limits of the search's work
best           simulated steps, and the best of them
by_hand        what people do without a planner
case           one way to set its flags but for the layers
case_pace      bounds of a case as if layers could be cut
settings       the flags of a case outside the grid of ranks
prices         times and memory of stages, like stages once
likes          numbers of like stages and messages
links          links of a stage's GPUs, and of those who hold experts for it
place          a stage's times and memory as straight lines
in_flight      micro-batches that stages keep for their backward passes
exchange       exchanges of gradients and new weights, as straight lines
least_exchange the same, below them and quicker
divisions      divisions of layers over stages and chunks
chunk_seconds  seconds of the passes of chunks
orders         orders of a cluster's nodes, as ranks
grids          grids of ranks over them
forms          widths, context parallelism, experts and settings of their groups
rates          what no case falls below, from the prices of single kinds of GPUs
grid_bounds    the same on a grid, with its least exchange
plan           a division of a case as a plan
"""
