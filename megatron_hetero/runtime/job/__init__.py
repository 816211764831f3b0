"""A training job from flags to Megatron's `pretrain`. Rooms: `checks` (refusals before the job
starts), `local` (ranks as processes of this machine).

entry         `python -m megatron_hetero.pretrain_gpt`
hook          a plan in a script of the user's own
steps         the three steps of every job: parse, configure, train
asymmetric    a job on an asymmetric plan
flags_on_plan  flags of such a job, parsed and checked
flexible_sequences  a job that deals documents to groups of GPUs at each step
attachments   additions of such a job to Megatron, in order
stock         a job that stock Megatron runs alone
arguments     our flags, and the plan that they ask for
rank_arguments  the flags that Megatron sees on each rank
workload      the workload that parsed flags describe
agreement     everything that ranks must have in common
meeting       the meeting of all ranks, before any group: all start alike, or none starts
world         the place of a process in its job, and its process group of all
one_machine   a job of one machine, on loopback alone
"""
