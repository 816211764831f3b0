"""Seeds of equal replicas: shapes of one replica, repeated over the cluster.

symmetric       grids as stock Megatron has them
equal_replicas  local search over the shape of a replica
shape_search    prices and neighbours of shapes
shape_layout    shapes laid out on nodes
sandwiches      one kind of GPUs inside, another at the ends
constructive    widths for each kind of node, then the rest
spread          groups exchanged so that no path is crowded
"""
