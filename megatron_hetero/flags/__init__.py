"""A plan as Megatron arguments, launch lines and launch files.
Rooms: `support` (the treatment of each flag on an asymmetric plan), `launchers` (launch files).

emit             the argument vector of a plan, for shells
decisions        flags that the plan decides, and contradictions
stock            the layers of a stock plan as Megatron's flags
launch           one torchrun line for each node, and what every rank is
gpu_needs        flags that some GPUs cannot follow
environment      environment variables, each with its reason
other_objective  settings that make another objective of the job
growing_batches  batches that a plan cannot divide
notes            what a plan leaves out of a script, and what it changes
unpriced         flags that change a step and that no price counts
planned_sizes    sizes that a plan was made for, beside those of its flags
needed           flags that a job cannot start without
job_script       a commented script of a whole job
"""
