"""A plan as Megatron arguments, launch lines and launch files.

emit                the argument vector of a plan, for shells
decisions           flags that the plan decides, and contradictions
stock               the layers of a stock plan as Megatron's flags
launch              one torchrun line for each node, and what every rank is
environment         environment variables, each with its reason
table               Megatron's flags as data, without torch
support             what an asymmetric plan does with a flag
support_kinds       the kinds of support, and what they mean
support_table       that, for every flag
support_passed      flags handed on to Megatron, by the reason why no plan differs by them
verification        what `verify` does with each flag of a job
verification_table  that, for every flag
other_objective     settings that make another objective of the job
growing_batches     batches that a plan cannot divide
needed              flags that a job cannot start without
job_script          a commented script of a whole job
"""
