"""Shapes of a replica: the order of its stages, and kinds of equal nodes.

order           the order of a replica's stages
kinds           classes of equal nodes
crowding        seconds for which messages take each path
"""
