"""Bytes of weights on a GPU, and the blocks of keys and values in the remaining memory.

A token's keys and values are on all stages of a pipeline, so the fullest stage decides for all.
vLLM says it in its own words: all ranks get the smallest number of KV blocks of any rank
(`vllm/v1/core/kv_cache_utils.py`).  Layers are therefore divided by memory as well as by speed.
"""

from __future__ import annotations

from math import inf

from megatron_hetero.cost.memory.libraries import CONTEXT_BYTES
from megatron_hetero.serving.prices.cache import CachePool, cache_groups
from megatron_hetero.serving.prices.engine import Engine
from megatron_hetero.serving.prices.matrices import layer_matrices
from megatron_hetero.serving.prices.served import ACTIVATION_BYTES, ServedModel
from megatron_hetero.serving.prices.steps import ReplicaPipeline, StagePrice, stage_prices

_COMMUNICATOR_BYTES = 400_000_000
"""Buffers of NCCL's communicator of a group (`cost.memory.libraries` has the parts)."""
_LOGIT_BYTES = 4.0


def weight_bytes(price: StagePrice) -> float:
    """Return the bytes of weights on one GPU of a stage."""
    served, width = price.served, price.stage.width
    model = served.model
    total = 0.0
    for number, matrices in price.layers:
        total += number * sum(m.elements for m in matrices) * served.weight_bytes
        # Two norms in 16 bits, whatever the format of the matrices.
        total += number * 2 * model.hidden_size * ACTIVATION_BYTES
    vocabulary = -(-model.vocab_size // width) * model.hidden_size * ACTIVATION_BYTES
    if price.is_first:
        total += vocabulary
    # A tied head is the embedding, on a single stage that has both.
    if price.is_last and not (model.tied_embeddings and price.is_first):
        total += vocabulary
    return total


def working_bytes(price: StagePrice, engine: Engine) -> float:
    """Return the bytes that a GPU needs beside weights, keys and values: activations of the largest
    step, logits, CUDA's context, communicators."""
    model, width = price.served.model, price.stage.width
    # The widest product of a step: its input and output, for all chosen experts.
    widest = max(
        m.depth + m.columns * m.active
        for kind in (model.kinds or (model,))
        for m in layer_matrices(kind, width)
    )
    activations = engine.max_batched_tokens * (4 * model.hidden_size + widest) * ACTIVATION_BYTES
    logits = engine.max_sequences * model.vocab_size * _LOGIT_BYTES if price.is_last else 0.0
    # One GPU alone exchanges with nobody.
    is_alone = width == 1 and price.is_first and price.is_last
    return activations + logits + CONTEXT_BYTES + (0 if is_alone else _COMMUNICATOR_BYTES)


def cache_pool(pipeline: ReplicaPipeline, served: ServedModel, engine: Engine) -> CachePool:
    """Return the blocks of keys and values that a replica holds: those of its fullest stage; none
    where the weights do not fit."""
    least = inf
    for price in stage_prices(pipeline.stages, served):
        memory = price.stage.gpu.memory_bytes * engine.memory_part
        # Room for keys and values, in blocks of the layers of a group on the stage.
        room = memory - weight_bytes(price) - working_bytes(price, engine)
        block = engine.block_tokens * price.num_cached * served.kv_bytes(price.stage.width)
        least = min(least, max(0.0, room // block) if block else inf)
    # A step more than stages is under way: the host prepares it while the others run.
    in_flight = (len(pipeline.stages) + 1) * engine.max_batched_tokens
    groups = cache_groups(served.windowed, served.window, engine.block_tokens, in_flight)
    return CachePool(int(least), groups)
