"""What a training job says of itself: times, rates, traffic.

step_time    measured step time and MFU beside the prediction
stage_ratio  stages beside their predictions, and GPUs that lag
token_rate   tokens per second of the job
timeline     timelines of real steps
straggler    Megatron's detector on unequal ranks
sync_report  what the gradient sync will do
traffic      bytes handed to the transport, beside the least
log_values   numbers in TensorBoard and W&B
"""
