"""Seconds and bytes of inference: one place for prefill, decode and steps that mix both.

engine    what an engine keeps back, how it batches, and what it cannot run
served    the model as it is served: shape, and bytes of weights and of keys and values
kernels   what kernels of a GPU type reach, by measured tables
watts     what the watts of a board keep up
sizes     how much longer calls of certain sizes last
matrices  the matrices of a layer on one GPU of a group
cache     blocks of keys and values: of a request, and of which layers
memory    weights on a GPU, and blocks of keys and values beside them
work      what a step does
measured  steps that the user measured, which win over tables
profile_file  the files that such steps are read from
basis     what a price rests on, in words
steps     seconds of one step of an engine on a stage and on a pipeline
prompts   means over the requests of a class
rates     requests per second of a replica, by class and phase
"""
