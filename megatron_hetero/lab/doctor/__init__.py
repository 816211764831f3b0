"""Preflight on the machines of a plan, and by Megatron itself.

command    `doctor --on-cluster`, on every rank
facts      facts that a process sees of its machine
exchange   values through one group, compared
meeting    agreement of the ranks, beside the groups under test
start      the process in which Megatron judges the start of a job
asked_job  that start, up to the model's configuration
refusals   what it raised: a refusal of the job, or a fault of this machine
"""
