"""The distance between a plan's training and the one process's.

compare  the worst distances over tensors, steps and ranks, and their bounds
measure  the distances of one rank and step
norm     gradient norms, between the one process's printed one and the exact one
half_precision  bounds of losses and norms, from few steps in half precision
adam     the part of a distance of weights that Adam makes of a distance of gradients
start    the initial weights of all ranks, compared bit by bit
initial  the distribution of initial weights, beside Megatron's own
holders  the weights of all holders of an element, compared bit by bit
log      what Megatron's log prints of both runs
fp8      the change of the loss by the rounding of weights to fp8
traffic  bytes handed to the transport, beside the least possible
"""
