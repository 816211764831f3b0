"""What the search needs under other systems' prices, which know no settings of a stage.

strategies    the problem of a question, and the strategies of a search
even_columns  column generation with as many micro-batches for every replica
even_mixes    mixes of slabs for it
mixed_shapes  shapes repeated with unlike GPUs
unit_mix      which GPUs make a replica of the same layers
local         small changes to the best placements
joins         replicas side by side joined into one
"""
