"""Measurements of the model's pieces and the machine, as input for plans.

command  `megatron-hetero probe`
rank     one rank of a probe
cards    which cards of a machine are measured
pairs    latency and bandwidth between every two cards
links    exchanges over links, in a sweep
link_fit GenModel's constants, fitted to a sweep
launching  seconds of the host for each operator
pieces   seconds of embedding, layer and head
machine  products, attention and messages by themselves, and what libraries take of memory
processes  fresh processes that measure together
"""
