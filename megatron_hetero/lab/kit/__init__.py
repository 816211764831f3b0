"""Trials of the runtime on one machine: `doctor --train`.

command     the checks in order, and what they found as data
equality    asymmetric plans beside one process
forecast    predicted against held memory and measured steps
race        the own runtime and stock Megatron, step by step in turns
live_bytes  bytes of tensors that a rank holds
small_job   the model of all these, and how this machine trains it
"""
