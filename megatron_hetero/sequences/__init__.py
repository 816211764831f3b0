"""The deal of unlike sequences to groups of GPUs, step by step.  Rooms: `price`, what sequences
cost on a group; `deal`, which group trains which.

tree            groups of ranks, nested in each other
cluster_groups  the groups of a job on a described cluster
replica_groups  the groups of a job on a plan, whose replicas may be pipelines
pipelines       what the stages of a replica take for micro-batches
simulated_step  when ranks are done with a dealt step
job_plan        the plan and the groups of a job
lengths         files and distributions of lengths
step_tokens     a dealt step as ranks run it
proof           its operations end under NCCL's rules
advice          what flexible groups gain for a file of lengths
"""
