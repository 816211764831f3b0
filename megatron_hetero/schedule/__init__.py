"""Programmes of the pipeline ranks as data, the deadlock check and the simulation.

programme  what every stage does, in order
parts      input and output of the simulator
network    messages on the cluster's paths
of_plan    the schedule that the runtime executes
check      the deadlock check
stock      which plans stock Megatron runs
estimate   what any plan takes, with queues on shared paths
"""
