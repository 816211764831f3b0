"""The processes of a verification, and the processes' records.

late_weights     new weights that are not there until they are waited for
jobs             all processes, started from one seed checkpoint
run_flags        flags of these processes, and the precisions in which they train
optimizer_flags  flags of learning rates and of Adam
one_process      stock Megatron in one process: the reference
casts            the one process in the precisions of a plan's stages
floor            the reference in another order of summation: the distance by rounding alone
record           losses, gradients, norms, weights and sample numbers of one rank, by step
recorder         the observer of a rank, which writes its record
routing          experts chosen by the reference, replayed on the plan
stock_division   whole gradients and weights where stock Megatron divides the optimizer
"""
