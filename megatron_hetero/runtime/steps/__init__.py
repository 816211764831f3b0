"""One training step of a replica: the programme of each stage, and its execution.

executed_step    one step of a stage, operation by operation
executor         a stage's programme in Megatron's loop
stage_programme  the programme of a stage, and the receives to post
step             one step of one replica
"""
