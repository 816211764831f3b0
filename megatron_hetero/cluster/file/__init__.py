"""cluster.yaml: its schema, and the way from the file to a `Cluster`.

description  the file to a `Cluster`, and its hash
schema       every key of the file
gpu_types    GPU types of the file and the links inside nodes of each
islands      a machine's unlike cards as nodes of like ones
bridges      links that two cards cannot have
links        classes of links and measured pairs to one link for each pair of nodes
lines        lines and uplinks that paths share
nics         network cards of a machine, and the GPUs near each
limits       what plans must keep to
quantities   text with units to numbers
references   refusals with line, key and near names
"""
