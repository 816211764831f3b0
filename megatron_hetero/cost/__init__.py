"""Seconds, bytes and memory of a piece of model on a piece of cluster.

model        `CostModel`: the price of any placement, cached piece by piece
placement    which devices hold which layers
placing      the placement of a plan, and what its replicas share
share        what one member of a tensor-parallel group holds and computes
parameters   parameters on one device
causes       what a stage's time is spent on
step_cost    what a placement costs: stages, replicas, the step
pipeline     seconds of a 1F1B pipeline
stage_prices prices of a stage in its own settings
stage_memories memory of each GPU of a stage
unit_prices  prices of pieces and memories
hop_prices   prices of stage boundaries
variants     the price lists of a job under other settings of single stages
choices      settings that plans may choose for themselves
fp8_sizes    sizes of a layer's products that are multiplied in fp8
widths       usable GPUs and tensor-parallel widths of a node
price        money for machines and for traffic between sites
utilization  model FLOPs utilization (MFU)
movement     what going from one plan to another takes
"""
