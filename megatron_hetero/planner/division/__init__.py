"""What is divided without a look at the GPUs: layers, micro-batches, and launch counts.

layers         the split of layers with the least time of the slowest stage
counts         launch counts
"""
