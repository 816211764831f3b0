"""Trials of the runtime on one machine: `doctor --train`.

command     the checks one after the other, and what they found as data
checks      the checks in order
verdicts    what is allowed, and what was found, in words
cases       the asymmetric plans
equality    such a plan beside one process
documents   flexible sequences beside one process
orders      schedules of their own for a plan's replicas
lost_rank   a job that loses a rank
shared_card ranks that share a GPU
forecast    predicted against held memory and measured steps
race        the own runtime and stock Megatron, step by step in turns
live_bytes  bytes of tensors that a rank holds
small_job   the model of all these, this machine, and how it trains the model
"""
