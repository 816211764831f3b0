"""Treatment of every Megatron flag on an asymmetric plan.

lookup              the treatment of one flag, or of a job's flags
kinds               the kinds of treatment, and their meaning
table               the kind of every flag, as data
dealt_experts       flags that do not go with experts dealt out over replicas
of_plan             flags that do not go with what a plan has: divided sequences, several chunks
rules               the form of rules that refuse flags, before the start and at the start
tensor_overlap      plans on which tensors are exchanged under products
passed              flags that Megatron's own code follows, with the reason why plans may use them
verification        the flags of a job in `verify`, on a small model and CPUs
verification_table  the treatment of every flag there, as data
"""
