"""The proof that all operations of a job, messages and collectives, end under NCCL's rules.

operations  the operations of every rank as data
of_plan     those of a plan: its start and one step
job_groups  communicators of a job, and peers of its ranks
check       whether those of a plan end
stage       those of one stage's programme
gradients   those of the gradients, the weights and sharded layers
rules       NCCL's rules, applied to operations
circle      ranks that wait for each other, in words
"""
