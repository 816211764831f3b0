"""The best plan that stock Megatron can run.

search     all that its flags can say
by_hand    what people do without a planner
case       one way to set its flags but for the layers
divisions  divisions of layers over stages and chunks
grids      grids of ranks over a cluster
forms      widths, context parallelism, experts and settings of their groups
rates      what no case falls below, from the prices of single kinds of GPUs
place      a stage's times and memory as straight lines
plan       a division of a case as a plan
"""
