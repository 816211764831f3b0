"""Compiled functions of Transformer Engine in plain torch: what its layers call.

enums        names of layouts, masks and types
widths       types of numbers, and the width in which a function computes
float8       casts to fp8 with one scale for a tensor
products     matrix products with bias, GELU and accumulation, alone and in groups
norms        LayerNorm and RMSNorm
activations  GELU and its kind, gated and not
softmax      scaled and masked softmax of unfused attention
attention    dense and packed attention, with the log-sum that context parallelism needs
layouts      the places of each sequence in the tensors of attention
optimizers   Adam, SGD and norms over lists of tensors
machine      answers about the machine that a CPU gives
"""
