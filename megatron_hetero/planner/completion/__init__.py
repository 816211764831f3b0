"""From a structure of stages to a placement: layers, micro-batches, recompute, launch counts.

completer         a structure completed with all settings, from cached tables
tables            what a completer knows of stages, of one micro-batch size
filled            the stages of one replica completed
tuner             layers and launch counts by the recurrence
fill              a placement for given chains of tensor-parallel groups
refit             the layers and settings of a placement chosen again, on the same devices
polish            single layers moved, each move priced
stage_options     the fastest option of a stage for each number of layers
sharded           layers whose weights the replicas divide
counts            launch counts
layers            the split of layers with the least time of the slowest stage
micro_batches     micro-batches of each replica
optimizer_shares  shares of the optimizer's state by free memory
settings          a placement found under other settings, written for the job's own
order             the order of a replica's stages
"""
