"""Observations of a training job: times, rates, traffic.

step_time    measured step time and MFU beside the prediction
stage_ratio  stages beside their predictions, and GPUs that lag
token_rate   tokens per second of the job
timeline     timelines of real steps
straggler    Megatron's detector on unequal ranks
sync_report  a summary of the gradient sync, for the start of the log
log_values   numbers in TensorBoard and W&B
"""
