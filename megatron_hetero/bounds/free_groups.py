"""A lower bound for plans with tensor-parallel groups of any GPUs in any shares.

The bound of `bounds.step_time` holds for groups of one node in equal shares.  Groups of unlike GPUs
have a bound by work alone, which prices prove (duality of linear programming).

Alone, device i takes A_i seconds for the attention of one layer and one sequence, forward and
backward, M_i for the MLP and H_i for the output layer.  Only work that shrinks with the device's
share counts, so a part x of the attention takes at least x A_i.  Give the three parts prices a, m
and h.  In T seconds device i does work of a price of at most T max(a/A_i, m/M_i, h/H_i), and n
sequences in L layers need work of the price n (L (a + m) + h).  So

    T >= n (L (a + m) + h) / sum_i max(a/A_i, m/M_i, h/H_i)

for every choice of prices; prices in proportion to the times of one of the GPU types are tried.
Where all GPUs are alike in proportion, each maximum is the same for its three terms and nothing is
lost.

Example: one GPU with A = M = 1 s and another with A = M = 3 s, 4 layers, no head, one sequence.
With a = m = 1: T >= 4 (1 + 1) / (1 + 1/3) = 6 s; indeed three quarters of every layer on the first
and one quarter on the second take 2 * 0.75 = 1.5 s a layer, 6 s in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.choices import context_parallels, shares_tokens
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.share import TensorShare, even_share
from megatron_hetero.cost.widths import usable_gpus
from megatron_hetero.cost.work.calibration import product_flops_per_s, shipped_calibration
from megatron_hetero.cost.work.compute import (
    can_train,
    core_attention_times,
    gemm_efficiency,
)
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.stage_precision import training_on
from megatron_hetero.model.blocks import whole_latent_params
from megatron_hetero.model.spec import Workload

FREE_GROUPS_RELAX = (
    "memory, whole layers and heads, communication of tensor-parallel groups, norms, pipeline "
    "fill, stage boundaries, gradient exchange, update"
)

_BACKWARD = 2.0
"""Products of the backward pass over those of the forward pass."""


def free_groups_bound_s(costs: CostModel) -> float | None:
    """Return a lower bound of every placement's step, for any groups and shares.

    None with a profile, whose measured times need not grow with a GPU's share.
    """
    if costs.profile is not None:
        return None
    costs = costs.of_least_layers()
    cluster, workload = costs.cluster, costs.workload
    counts: dict[str, int] = {}
    types: dict[str, GpuType] = {}
    # Types may stand on several nodes; only their numbers of usable GPUs count.
    for node in cluster.nodes:
        if can_train(workload.training, node.gpu_type):
            name = node.gpu_type.name
            types[name] = node.gpu_type
            counts[name] = counts.get(name, 0) + len(usable_gpus(cluster, node))
    if not any(counts.values()):
        return None
    divides = shares_tokens(costs) or bool(context_parallels(costs, 1, len(cluster.devices)))
    times = {name: _parts_s(workload, gpu, divides) for name, gpu in types.items()}
    num_layers = workload.model.num_layers
    # How often a sequence needs attention, MLP and output layer.
    needed = (num_layers, num_layers, 1)
    # Any prices prove a bound; the times of each type are tried as prices.
    found = [_bound_s(prices, needed, times, counts) for prices in times.values()]
    return workload.training.global_batch_size * max(found)


def _bound_s(
    prices: Sequence[float],
    needed: Sequence[int],
    times: dict[str, tuple[float, ...]],
    counts: dict[str, int],
) -> float:
    """Return seconds of a sequence proved by the prices."""
    work = sum(price * number for price, number in zip(prices, needed, strict=True))
    # A GPU spends its second on the part that pays it best.
    rate = sum(
        counts[name] * max(p / s for p, s in zip(prices, parts, strict=True))
        for name, parts in times.items()
    )
    return work / rate


def _parts_s(workload: Workload, gpu: GpuType, divides: bool) -> tuple[float, ...]:
    """Return seconds of attention, MLP and output layer for a sequence on a single GPU, both
    passes, without work repeated on every member of a group.

    Args:
        workload: the job.
        gpu: the type.
        divides: groups may divide sequences, and then fuse attention that is not fused otherwise;
            the attention that takes less time counts.
    """
    # One GPU with everything: no work is done twice.
    model, training = workload.model, training_on(workload.training, (gpu,))
    share = even_share(model, 1)
    flash = uses_flash_attention(model, training, gpu)
    # Work of both halves of a layer, at the best rate of the type.
    attention = attention_work(model, training, share, flash)
    mlp = mlp_work(model, training, share, flash)
    per_s = product_flops_per_s(gpu, training.precision)
    per_s *= gemm_efficiency(gpu, training.precision).max_efficiency
    sequences = training.micro_batch_size
    # Attention may be fused where sequences are divided: take the lesser.
    products = 1 + _BACKWARD
    jobs = [replace(workload, training=training)]
    if divides and training.fused_scores == "divided":
        jobs.append(replace(workload, training=replace(training, fused_scores="everywhere")))
    core_s = min(_core_s(job, gpu, share) for job in jobs)
    # What each member may do whole is left out; of experts all but the router divides.
    tokens = sequences * model.seq_length
    # Projections to latents may be on every member, as the router of experts is.
    divided = sum(attention.gemm_flops) - 2.0 * tokens * whole_latent_params(model)
    own = mlp.gemm_flops[1:] if model.num_experts else mlp.gemm_flops
    head_flops = 2.0 * tokens * model.vocab_size * model.hidden_size
    logits_bytes = float(tokens * model.vocab_size * training.element_bytes)
    memory_s = logits_bytes / shipped_calibration().memory_bytes_per_s(gpu)
    return (
        (products * divided / per_s + core_s) / sequences,
        products * sum(own) / per_s / sequences,
        (products * head_flops / per_s + memory_s) / sequences,
    )


def _core_s(workload: Workload, gpu: GpuType, share: TensorShare) -> float:
    """Return the seconds added by the scores and context of all heads, both passes: a kernel's
    fixed cost is the same for any share."""
    twice = replace(share, query_groups=2 * share.query_groups)
    once, both = (core_attention_times(workload, [(gpu, own)]).total_s for own in (share, twice))
    return both - once
