"""What would hang or train wrongly, found before the job starts: the checks behind `doctor`.

check           all checks that need no machine
job             plan, cluster, flags and environment under test
finding         what a check reports
plan_checks     does the plan still fit its cluster
flag_checks     flags that do not do what they say
gpu_checks      precisions, formats and kernels that GPUs lack
network_checks  what makes NCCL hang
machine         what one process sees of its machine
machine_checks  machines side by side
groups          which ranks talk to each other
"""
