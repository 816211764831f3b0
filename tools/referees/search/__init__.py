"""What the search needs under other systems' prices, which know no settings of a stage.

strategies      the problem of a question, and the strategies of a search
even_columns    column generation with as many micro-batches for every replica
even_mixes      mixes of bundles for it
mixed_shapes    shapes repeated with unlike GPUs
unit_mix        which GPUs make a replica of the same layers
equal_replicas  hill climbing over the shape of a replica
shape_search    prices and neighbours of shapes
shape_layout    shapes laid out on nodes
sandwiches      one kind of GPUs inside, another at the ends
local           small changes to the best placements
joins           replicas side by side joined into one
"""
