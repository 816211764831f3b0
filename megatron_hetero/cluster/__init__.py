"""The cluster as data: GPUs, nodes, links, sites; its file is read in `cluster.file`.

spec          `Cluster`: what all rooms plan with
nodes         `Node`, `Device`, `GpuType`: what it is made of
limits        `Limits`: what the user fixes in every plan
catalogue     GPU types by name, each number with its source
makers        communication libraries, and which GPUs cannot talk
gpu_names     names that drivers, schedulers and clouds give to GPUs
node_links    links between nodes, as classes and exceptions
link_classes  the distinct links, and which each pair of nodes has, as arrays
nvlink        what NCCL's collectives reach over NVLink, by measured tables
lines         capacities that several paths share
nics          which GPU of a machine sends over which network card
graph         the cluster as a networkx graph
site_tour     the order in which rings visit sites
doubt         statements of a file that it contradicts itself
names         host names, and names of cards and islands
"""
