"""Serving of one replica in the runtime: stages of unlike widths and shares, whose engine no CUDA
engine is.

`batch` is what all ranks are told of a step, `scheduler` decides it, `attention` holds keys and
values, `stage` computes a rank's part of a step, `sampling` draws tokens, `channel` carries steps
and tokens between ranks, `engine` is the loop of the first rank, `protocol` and `endpoint` answer
OpenAI's requests, `rank` is a process and `command` starts them all.
"""
