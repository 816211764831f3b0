"""Measurements of the model's pieces and the machine, as input for plans.

command  `megatron-hetero probe`
rank     one rank of a probe
pieces   seconds of embedding, layer and head
machine  products, attention, memory and messages by themselves
"""
