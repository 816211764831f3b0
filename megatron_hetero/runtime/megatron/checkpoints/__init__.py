"""Symbols of Megatron and torch that are replaced so that checkpoints last, one file each.

save         the whole of a save
data         the data of a save
tracker      the file that names the newest step
load         the whole of a load
loaded_data  the data of a load
metadata     torch's pickle of what lies where
sharding     the check that pieces cover a tensor
"""
