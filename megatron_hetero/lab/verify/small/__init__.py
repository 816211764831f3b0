"""The small job of a verification: a model, flags and text that this machine can train.

shrink        a small model for a plan of unchanged shape
fewer_layers  the plan, for fewer layers
architecture  Megatron's flags of the small model's architecture
job_flags     flags of the job, as the small model takes them
flag_values   values in place of the job's own
text          real text, from the source of the standard library
"""
