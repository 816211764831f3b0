"""What dividing sequences among groups adds to a layer: the wait for keys and values, and merging
what the rounds of a ring give."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.collectives import all_to_all_s, context_parallel_times
from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.compute import (
    PassTimes,
    context_exchange,
    core_attention_times,
    slowest,
)
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.cost.work.under_products import Member
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.model.spec import ModelSpec, Workload


def waiting_times(
    workload: Workload, members: Sequence[Member], link: Link | None
) -> PassTimes:
    """Time a layer's wait for the keys and values of other parts of the sequence.

    In a ring keys and values travel while attention works on those that are there: all rounds but
    the first hide that long.  Where heads are exchanged, queries, keys and values go before
    attention begins and the result goes back (`AttnFuncWithCPAndQKVOA2A` of Transformer Engine
    2.20), backward their gradients.  Recomputed attention asks for all again.  Where keys and
    values are gathered, unlike parts travel as long as the longest of them
    (`runtime.parallel.context_attention`); Transformer Engine gathers either by itself, keeps none,
    and gathers again backward (`AttnFuncWithCPAndKVAllGather`).

    Args:
        workload: the job.
        members: type and share of each GPU of a group.
        link: the slowest between GPUs that hold other parts of the same sequences.
    """
    model, training = workload.model, workload.training
    context = members[0][1].context_parallel
    if context == 1:
        return PassTimes(0.0, 0.0)
    share, how = members[0][1], context_exchange(workload, members)
    if how == "heads":
        forward_s = backward_s = _heads_s(workload, members, link)
    else:
        keys, values = max((_widths(model, share)[1:3] for _, share in members), key=sum)
        tokens = training.micro_batch_size * context * max(share.all_sequence_tokens(model))
        widths = (keys, values) if how == "gather twice" else (keys + values,)
        sent = [
            context_parallel_times(
                width * tokens * training.element_bytes, context, link, how == "ring"
            )
            for width in widths
        ]
        forward_s, backward_s = map(sum, zip(*sent, strict=True))
    if how == "gather twice":
        backward_s += forward_s
    if how == "ring":
        core, hidden = core_attention_times(workload, members), (context - 1) / context
        forward_s = max(0.0, forward_s - hidden * core.forward_s)
        backward_s = max(0.0, backward_s - hidden * core.backward_s)
    # Recomputed attention asks for them once more in the backward pass.
    if "core_attn" in recomputed(training):
        backward_s += forward_s
    return PassTimes(forward_s, backward_s)


def _widths(model: ModelSpec, share: TensorShare) -> tuple[int, int, int, int]:
    """Return a member's channels of queries, keys, values and attention's result: latent attention
    has as wide keys as queries; else keys are as wide as values."""
    query, value = attention_sizes(model, share)
    return (query, query, value, value) if model.kv_lora_rank else (query, value, value, query)


def _heads_s(workload: Workload, members: Sequence[Member], link: Link | None) -> float:
    """Time one pass's exchange of heads for parts of sequences."""
    if link is None:
        return 0.0
    training, context = workload.training, members[0][1].context_parallel
    found = []
    for _, share in members:
        width_bytes = share.num_tokens(workload.model, training) * training.element_bytes
        # Queries, keys, values and the result, each an exchange of its own.
        sizes = [width * width_bytes for width in _widths(workload.model, share)]
        found.append(sum(all_to_all_s(size, context, link) for size in sizes))
    return max(found)


def merging_times(workload: Workload, members: Sequence[Member]) -> PassTimes:
    """Time what Transformer Engine moves through a GPU's memory around its calls of attention in a
    layer with parts of sequences; zero of others.

    Elements read and written by `AttnFuncWithCPAndKVP2P` of Transformer Engine 2.20, on the rank
    with the last part of a causal sequence.  Forward: keys and values are put side by side, the
    first round's result is copied, and that of each other round is added to it.  Backward: keys and
    values are copied, and the gradients of queries, keys and values are copied in the first round
    and added in the others, half of those of keys and values.  Where it gathers keys and values it
    puts all of them in the order of the sequence, and the gradients of all in that of the ranks,
    after those of two chunks of queries were added to zeros (`AttnFuncWithCPAndKVAllGather`).
    """
    model, training = workload.model, workload.training
    how = context_exchange(workload, members)
    if how == "gather":
        return PassTimes(0.0, 0.0)
    found = []
    for gpu, share in members:
        query, key, value, result = _widths(model, share)
        pair, rounds = key + value, share.context_parallel - 1
        forward = 2 * pair + (2 + 3 * rounds) * result
        backward = 4 * pair + 2 * query + (3 * query + 1.5 * pair) * rounds
        if how == "heads":
            # Each tensor is copied before it goes and put in order when it has come.
            forward = 4 * (query + pair + result)
            backward = 1.0 * forward
        if how == "gather twice":
            parts = share.context_parallel
            forward = 2 * parts * pair + 3 * result
            backward = (8 * parts + 1.5) * pair + 2 * query
        if "core_attn" in recomputed(training):
            backward += forward
        num_bytes = share.num_tokens(model, training) * training.element_bytes
        memory_s = speed_of(training, gpu).memory_s
        found.append(PassTimes(memory_s(forward * num_bytes), memory_s(backward * num_bytes)))
    return slowest(found)
