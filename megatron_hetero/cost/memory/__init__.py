"""Bytes on one device: weights, optimizer states, activations.

device       all parts of one device of a stage
stage        the memory of a stage by its layers, and memories combined
states       bytes of a parameter, and who divides its states
sharded      the same where replicas divide some layers
libraries    what CUDA and its libraries take, and the margin beside them
working      bytes that passes need beside them, and the buffer of unfused attention
activations  bytes kept from forward to backward, tensor by tensor
ends         those of embedding, head and further tokens
mlp          those of the MLP or the experts of a layer
holdings     state that each device of a plan keeps, as intervals
"""
