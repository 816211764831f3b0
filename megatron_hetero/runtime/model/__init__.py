"""Megatron's model and data, and their changes for a plan.

gpt                 batch, loss, data sets and layer spec of a GPT
data                the samples that each replica reads
datasets            the data sets of a job, packed ones among them
packed              documents packed into one sequence, and their attention
provider            providers of data sets, as Megatron calls them
hooks               changes between a model's construction and its optimizer's
initial_weights     initial weights that no layout changes
experts             mixture of experts
dealt_experts       whole experts dealt out to the ranks of a stage
expert_bias         bias of experts by the tokens of the whole job
latent_attention    multi-latent attention on a group
reported_logits     the largest attention logit of each head
prediction          layers that predict further tokens
rotary              rotary positions of a rank's own tokens
spec_parts          parts of layer specs, replaced
fp8                 Transformer Engine's fp8
precision           stages in bf16, fp16 or fp32, each in its own
norm                norms that allow sequence parallelism
custom_spec         layers of the user's own
transformer_engine  a check that Transformer Engine is usable
"""
