"""One training job from its flags to Megatron's `pretrain`.

entry          `python -m megatron_hetero.pretrain_gpt`
hook           a plan in a script of the user's own
steps          the three steps of every job: parse, configure, train
asymmetric     a job on an asymmetric plan
attachments    what such a job attaches to Megatron, in order
stock          a job that stock Megatron runs alone
arguments      our flags, and the flags that Megatron sees on each rank
support        refusals before any process group exists
refused_flags  the flags refused, each with its reason
needs          packages and partners that flags need
batches        global batches, divided among replicas
machine        is this process where the plan wants it
bus            cards by their places on the PCI bus
world          how the processes of a job meet
local_launch   ranks as processes of this machine
"""
