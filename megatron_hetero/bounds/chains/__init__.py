"""The least time of any chain of stages, by the GPUs that the chain takes.

stages        every option to make one stage of like GPUs, with its least time
least_chains  the table of least chains, stage after stage
rests         the inner loop of that table
axes          axes of that table: GPUs of each class, or prices of them
levels        coarser units of long axes
dominance     options of a stage that no least chain needs
ends          places of the stages that hold the word embedding
kinds         classes of like GPUs
"""
