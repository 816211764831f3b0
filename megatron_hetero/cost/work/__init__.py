"""Seconds of the model's pieces on the GPUs of one tensor-parallel group.

pieces       embedding, layer and head on a stage, modelled or measured
compute      the analytic model of a layer
speed        rates of a GPU in the job's precision
context_parallel  what dividing sequences among groups adds to a layer
ends         the same of the embedding and the head
group_ends   the ends on a group, with its exchanges
layer_work   products and memory traffic of the parts of a layer
traffic      bytes that the operators of a layer move beside its products
gradient_sums  sums of gradients into main gradients, and the update
launches     operators that the host launches for a piece
host_work    work of the host beyond what it launches, in units of an operator
products     seconds of a matrix product, by measured tables
under_products  exchanges of a tensor-parallel group that hide under products
gathered     what a tensor-parallel group gathers: bytes of an element, widths of latents
calibration  what GPUs reach of their peaks, from published tables
fused_attention  which GPUs have a kernel of fused attention, and the part of products it reaches
profile      profile.json
stage_precision  what a group computes in where stages have precisions of their own
gauge        modelled times corrected by the nearest measured ones
"""
