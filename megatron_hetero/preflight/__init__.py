"""Checks before a job starts, for causes of hangs and of wrong training; `doctor` runs the checks.

check           all checks that need no machine
job             plan, cluster, flags and environment under test
finding         the report of one check
plan_checks     the plan against its cluster: places, limits, memory, age
flag_checks     flags that do not do what they say
gpu_checks      precisions, formats and kernels that GPUs lack
network_checks  settings that make NCCL hang
start           Megatron's own checks, asked in another process
machine         facts that one process sees of its machine
machine_checks  machines side by side
groups          groups of ranks that exchange values
"""
