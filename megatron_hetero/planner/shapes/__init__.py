"""Seeds of equal replicas: shapes of one replica, repeated over the cluster.

symmetric       grids as stock Megatron has them
order           the order of a replica's stages
constructive    widths for each kind of node, then the rest
divided         grids whose stages divide sequences
crowding        seconds for which messages take each path
"""
