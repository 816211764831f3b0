"""Treatment of every Megatron flag on an asymmetric plan.

lookup          the treatment of one flag, or of a job's flags
kinds           the kinds of treatment, and their meaning
tables          reader of the kinds of all flags (`support.json`, `verification.json`)
dealt_experts   flags that do not go with experts dealt out over replicas
of_plan         flags that do not go with what a plan has: divided sequences, several chunks
rules           the form of rules that refuse flags, before the start and at the start
tensor_overlap  plans on which tensors are exchanged under products
verification    the flags of a job in `verify`, on a small model and CPUs
"""
