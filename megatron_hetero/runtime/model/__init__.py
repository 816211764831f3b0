"""Megatron's model and data, and their changes for a plan.

gpt                 batch, loss, data sets and layer spec of a GPT
hooks               changes between a model's construction and its optimizer's
initial_weights     initial weights that no layout changes
prediction          layers that predict further tokens
spec_parts          parts of layer specs, replaced
fp8                 Transformer Engine's fp8
precision           stages in bf16, fp16 or fp32, each in its own
norm                norms that allow sequence parallelism
custom_spec         layers of the user's own
"""
