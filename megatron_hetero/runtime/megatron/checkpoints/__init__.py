"""Replacements of symbols of Megatron and torch to make checkpoints last, a file for each.

save         the whole of a save
data         the data of a save
tracker      the file that names the newest step
load         the whole of a load
loaded_data  the data of a load
metadata     torch's pickle of what lies where
sharding     the check that pieces cover a tensor
"""
