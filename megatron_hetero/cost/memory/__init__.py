"""Bytes on one device: weights, optimizer states, activations.

device       all parts of one device of a stage
sharded      the same where replicas divide some layers
libraries    what CUDA and its libraries take, and the margin beside them
working      bytes that passes need beside them, and the buffer of unfused attention
activations  bytes kept from forward to backward, tensor by tensor
holdings     state that each device of a plan keeps, as intervals
"""
