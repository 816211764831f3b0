"""Structures that a search starts from.

symmetric     grids as stock Megatron has them
constructive  widths for each kind of node, then the rest
divided       grids whose stages divide sequences
starts        the most promising of them
first_fit     a plan that fits, however slow
settings      a placement found under other settings, written for the job's own
more_room     a structure in which all layers find room, by moves
"""
