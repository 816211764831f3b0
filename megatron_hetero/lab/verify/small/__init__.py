"""The small job of a verification: a model, flags and text that this machine can train.

shrink     a small model for a plan of unchanged shape
job_flags  flags of the job, as the small model takes them
text       real text, from the source of the standard library
"""
