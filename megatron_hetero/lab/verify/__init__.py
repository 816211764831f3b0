"""`megatron-hetero verify`: train a plan beside one process of stock Megatron, and compare.
Rooms: `small` (a model for this machine), `processes` (both trainings and their records),
`distance` (the comparison) and `faults` (planted errors that must be caught).

command   options in, data out, behind the command line
options   steps, optimizers, precision and a planted error
run       both trainings side by side, and their distance
time_left progress in words, with the time that is left
checks    memory and the room for a checkpoint, before a verification starts
outcome   distances and bounds of every optimizer, also as JSON data
"""
