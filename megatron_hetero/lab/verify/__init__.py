"""`megatron-hetero verify`: train a plan beside one process of stock Megatron, and compare.

`shrink` makes the model small enough for the machine and leaves the plan's shape alone, `text`
makes a data set of real text, `record` writes down what each rank saw, `compare` measures the
distance, `faults` plants errors that must be caught, `options` say how to train, `jobs` are the
processes, `run` puts them together, `outcome` is what was found and `command` talks to the
terminal.
"""
