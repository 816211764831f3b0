"""Training with `--hetero-sequences flexible`: at each step documents are dealt to groups of GPUs,
or of the replicas of a plan (`job.flexible_sequences` starts it).

documents      documents of indexed data, one a sequence, in an order that a job resumes
steps          the steps of a data set, dealt ahead of time on rank 0
groups         the process groups of nested groups of replicas
own_batch      what one rank has of a group's sequences
attention      attention inside sequences that a group divides
head_exchange  heads exchanged all to all among ranks of a group
layers         attention and rotary positions in a GPT
schedule       one step, in Megatron's loop
balance        the line of the log: predicted and real balance
"""
