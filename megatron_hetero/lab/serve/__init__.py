"""Serving of one replica in the runtime, of stages with unlike widths and shares, which no CUDA
engine runs.

batch       what all ranks are told of a step
scheduler   which sequences advance in a step, and whose blocks they hold
attention   keys and values of earlier steps, and rotary angles by position
stage       a rank's part of a step
sampling    tokens drawn from logits
channel     steps to all ranks, and tokens back
engine      the loop of the first rank
protocol    OpenAI's requests and answers as data
endpoint    the HTTP server
support     flags of every replica; models and layouts that are refused
rank        one process
command     all processes of a replica on this machine
"""
