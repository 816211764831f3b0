"""From a structure of stages to a placement: layers, micro-batches, recompute, warm-up.

completer         a structure completed with all settings, from cached tables
filled            the stages of one replica completed
tuner             layers and launch counts by the recurrence
fill              chains of units to a placement
refit             a placement fitted again on its devices
polish            single layers moved, each move priced
stage_options     what a stage takes with so many layers
sharded           layers whose weights the replicas divide
counts            launch counts
layers            exact minimax split of layers
micro_batches     micro-batches of each replica
optimizer_shares  shares of the optimizer's state by free memory
settings          a placement found under other settings than the job's
order             the order of a replica's stages
"""
