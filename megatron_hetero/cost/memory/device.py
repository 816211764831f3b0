"""Bytes of Megatron's allocations on a device of a stage, part by part.

Weights, gradients and optimizer states follow the parameter shards (`cost.parameters`),
activations the micro-batches in flight (`cost.memory.activations`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from megatron_hetero.cluster.spec import GpuType
from megatron_hetero.cost.memory.activations import (
    embedding_activation_bytes,
    further_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    mask_bytes,
    own_mask_bytes,
)
from megatron_hetero.cost.memory.libraries import KeptFree
from megatron_hetero.cost.memory.working import (
    attention_buffer_bytes,
    largest_tensor_bytes,
    overlap_buffer_bytes,
    working_bytes,
)
from megatron_hetero.cost.parameters import (
    expert_params,
    layer_params,
    stage_params,
    word_params,
)
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.compute import uses_flash_attention
from megatron_hetero.model.spec import ModelSpec, TrainingSpec, Workload


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: weight, gradient buffer, what the optimizer keeps beside them, and the
    fp32 copy of its gradient that lives during the update alone."""

    weight: int
    gradient: int
    optimizer: int
    update: int = 0


def state_bytes(training: TrainingSpec) -> StateBytes:
    """Return the bytes per parameter that Megatron keeps.

    bf16 accumulates gradients in fp32 (2 + 4 + 12), and so does fp16 beside other precisions; fp16
    otherwise, and bf16 with --grad-reduce-in-bf16, in their own (2 + 2 + 12), with an fp32 copy
    during the update (4 more; `_copy_model_grads_to_main_grads` makes it, `zero_grad` drops it
    before the next forward pass); fp32 has no second copy of the weights (4 + 4 + 8). SGD keeps one
    moment (Megatron's default momentum is 0.9).
    """
    moments = 8 if training.optimizer == "adam" else 4
    match training.precision:
        case "bf16" | "fp16" if training.mixes_precisions:
            return StateBytes(2, 4, 4 + moments)
        case "bf16" if not training.grad_reduce_in_bf16:
            return StateBytes(2, 4, 4 + moments)
        case "bf16" | "fp16":
            return StateBytes(2, 2, 4 + moments, update=4)
        case "fp32":
            return StateBytes(4, 4, moments)


_FP8_COPIES_BYTES = 2
"""Per parameter of a layer: Transformer Engine keeps its fp8 weights from one micro-batch to the
next, and transposed as well (before Blackwell)."""


@dataclass(frozen=True)
class StateHolders:
    """Number of devices that divide the optimizer states of a parameter, under the distributed
    optimizer: for a layer, all devices that hold a layer, over all replicas; for a tied embedding
    all holders of the embedding (a device with more than others counts them as fewer). `embedding`
    and `head`, where they are not tied, have those that hold these; None is as many as of the
    layers.  `experts`: of a layer's experts, where stages deal them out over replicas unlike each
    other; None is as many as the stage's own groups make of `layers`.

    Without `--use-distributed-optimizer` each device keeps all states of its parameters.
    """

    layers: float = 1
    tied_embedding: float = 1
    embedding: float | None = None
    head: float | None = None
    experts: float | None = None


EVERY_DEVICE = StateHolders()
"""Every device keeps the states of all of its parameters."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage: `base_bytes` without any layer, and what each layer adds.

    Both are split by cause; keys are those of `plan.DeviceEstimate.parts_bytes`.  Of a model with
    layers of unlike kinds, `per_layer` is of no lighter layers than a quarter of the model in a row
    has on average, and `kinds` has the memory of each kind (`with_layers`).

    Two moments may be the peak: while passes are computed, which `base` and `per_layer` describe,
    and the update, which has no activations and no buffers of passes, but copies of gradients:
    `update_base_bytes`, and `update_layer_bytes` for each layer.
    """

    base: Mapping[str, int]
    per_layer: Mapping[str, int]
    capacity_bytes: int
    kinds: tuple[StageMemory, ...] = ()
    update_base_bytes: int = 0
    update_layer_bytes: int = 0

    def with_layers(self, counts: Sequence[int]) -> StageMemory:
        """Return the memory of a stage with so many layers of each kind; of that many alone."""
        if not self.kinds:
            return self
        # The base takes all that the counted layers have beyond the mean layer, which stays as
        # `per_layer`.
        total = sum(counts)
        base = {
            part: size
            + sum(n * kind.per_layer[part] for n, kind in zip(counts, self.kinds, strict=True))
            - total * self.per_layer[part]
            for part, size in self.base.items()
        }
        copies = sum(
            n * kind.update_layer_bytes for n, kind in zip(counts, self.kinds, strict=True)
        )
        copies -= total * self.update_layer_bytes
        update = self.update_base_bytes + copies
        return replace(self, base=base, kinds=(), update_base_bytes=update)

    def parts_bytes(self, num_layers: int) -> dict[str, int]:
        """Return the bytes by cause with `num_layers` layers; the buffers hold what the update
        takes beyond the activations and buffers of passes."""
        parts = {part: self.base[part] + num_layers * self.per_layer[part] for part in self.base}
        if more := self.peak_bytes(num_layers) - self.training_bytes(num_layers):
            parts["buffers"] += more
        return parts

    def peak_bytes(self, num_layers: int) -> int:
        """Return the bytes with `num_layers` layers at the greater of the two moments."""
        training = self.training_bytes(num_layers)
        return max(training, self.updating_bytes(num_layers)) if self.has_copies else training

    def training_bytes(self, num_layers: int) -> int:
        """Sum all parts with `num_layers` layers while passes are computed."""
        return self.base_bytes + num_layers * self.bytes_per_layer

    def updating_bytes(self, num_layers: int) -> int:
        """Sum the bytes with `num_layers` layers while the optimizer works on them."""
        base, layer = self.updating_line
        return base + num_layers * layer

    @property
    def has_copies(self) -> bool:
        """Return whether the update has copies of gradients; without copies the update is never the
        peak."""
        return bool(self.update_base_bytes or self.update_layer_bytes)

    @cached_property
    def updating_line(self) -> tuple[int, int]:
        """Return the bytes during the update without layers, and what each adds.

        Copies of fp8 weights, which are each layer's buffers, stay.
        """
        # The last backward pass has given activations and its buffers back.
        freed = self.base["activations"] + self.base["buffers"]
        base = self.base_bytes - freed + self.update_base_bytes
        layer = self.bytes_per_layer - self.per_layer["activations"] + self.update_layer_bytes
        return base, layer

    @cached_property
    def base_bytes(self) -> int:
        """Sum all parts without any layer, while passes are computed."""
        return sum(self.base.values())

    @cached_property
    def bytes_per_layer(self) -> int:
        """Sum the bytes that a layer adds to all parts, while passes are computed."""
        return sum(self.per_layer.values())

    @cached_property
    def max_layers(self) -> int:
        """Return the number of layers that fit; negative when even the base does not."""
        most = (self.capacity_bytes - self.base_bytes) // self.bytes_per_layer
        if not self.has_copies:
            return most
        base, layer = self.updating_line
        return min(most, (self.capacity_bytes - base) // layer)


def least_memory(memories: Sequence[StageMemory]) -> StageMemory:
    """Return the memory that has the least of each part; itself of one."""
    first, *others = memories
    if not others:
        return first
    return replace(
        first,
        base={part: min(m.base[part] for m in memories) for part in first.base},
        per_layer={part: min(m.per_layer[part] for m in memories) for part in first.per_layer},
        update_base_bytes=min(m.update_base_bytes for m in memories),
        update_layer_bytes=min(m.update_layer_bytes for m in memories),
    )


def kept_sends(launch_counts: Sequence[int]) -> list[int]:
    """Return, by stage, the tensors kept by our runtime for the stage's neighbours.

    A sent tensor is kept until as many later ones are sent as its sender launches ahead
    (`runtime.parallel.boundary`).  Receives are posted ahead (`schedule.orders.delivery`): of each
    neighbour one more than the launch counts differ; `stage_memory` counts that one itself.
    """
    # Shape [stage + 1]: entry i is the boundary before stage i; beyond both ends there is none.
    sent = [0, *launch_counts[:-1], 0]
    posted = [0, *[max(before - after, 0) for before, after in pairwise(launch_counts)], 0]
    return [sum(sent[i : i + 2]) + sum(posted[i : i + 2]) for i in range(len(launch_counts))]


def stage_memory(
    workload: Workload,
    gpu: GpuType,
    share: TensorShare,
    *,
    first: bool,
    last: bool,
    num_in_flight: int,
    vocab_rows: int,
    kept_free: KeptFree,
    num_sends_kept: int | None = None,
    holders: StateHolders = EVERY_DEVICE,
) -> StageMemory:
    """Compute the memory of a stage's device with `num_in_flight` micro-batches kept for backward.

    Args:
        gpu: the device's type, which decides whether attention is fused.
        share: its part of the tensor-parallel group.
        first, last: whether the stage holds the embedding, the head.
        num_in_flight: micro-batches kept for backward at the peak.
        vocab_rows: rows of the padded vocabulary.
        kept_free: memory that holds no tensors of Megatron's.
        num_sends_kept: tensors kept because they may still be under way to a neighbour; None is one
            for each neighbour, as in stock Megatron.
        holders: devices that share the distributed optimizer's states.
    """
    model, training = workload.model, workload.training
    # A model with several kinds of layers has one memory for each kind.
    if model.kinds:
        kinds = tuple(
            stage_memory(
                replace(workload, model=kind),
                gpu,
                share.of_kind(i),
                first=first,
                last=last,
                num_in_flight=num_in_flight,
                vocab_rows=vocab_rows,
                kept_free=kept_free,
                num_sends_kept=num_sends_kept,
                holders=holders,
            )
            for i, kind in enumerate(model.kinds)
        )
        return _of_kinds(model, kinds)
    # With unlike shares: the vocabulary of which an even share is this member's rows.
    width = share.width
    vocab_rows = share.rows_as_if_even(model, vocab_rows)
    element = training.element_bytes
    states = state_bytes(training)
    # The GPU decides what is kept: unfused attention stores its scores.
    flash = uses_flash_attention(training, gpu)
    tokens = share.num_tokens(model, training)
    # Elements at a boundary, and the tensors kept there for neighbours.
    boundary = share.own_tokens(model, training) * model.hidden_size * training.residual_bytes
    num_hops = (not first) + (not last)
    num_sends_kept = num_hops if num_sends_kept is None else num_sends_kept
    # Parameters outside of layers, by end: a tied embedding is counted by itself, for its holders.
    first_params = stage_params(model, share, 0, first, False, vocab_rows)
    base_params = stage_params(model, share, 0, first, last, vocab_rows)
    last_params = base_params - first_params
    tied_params = 0
    if model.tied_embeddings and (first or last):
        tied_params = word_params(model, width, vocab_rows)
        first_params -= tied_params if first else 0
        last_params -= 0 if first else tied_params
    embedding_holders = holders.embedding or holders.layers
    head_holders = holders.head or holders.layers
    layer = layer_params(model, share)
    # What a micro-batch keeps outside of layers.
    kept_once = 0
    if first or last:
        kept_once += mask_bytes(model, training, share, flash)
    if first:
        kept_once += embedding_activation_bytes(model, training, share)
    logits_bytes = 0
    if last:
        kept_once += head_activation_bytes(model, training, share, vocab_rows)
        kept_once += further_activation_bytes(model, training, share, vocab_rows, flash)
        # Logits in the job's own precision, beside what the loss keeps of them in fp32.
        logits_bytes = tokens * (vocab_rows // width) * (element if element < 4 else 0)

    def of_ends(state: int) -> int:
        """Return the bytes of states of embedding and head, so many for each parameter."""
        tied = _ceil(tied_params * state, holders.tied_embedding)
        embedding = _ceil(first_params * state, embedding_holders)
        return tied + embedding + _ceil(last_params * state, head_holders)

    def of_layer(state: int) -> int:
        if not training.use_distributed_optimizer:
            return layer * state
        return _layer_states_bytes(model, share, layer, holders, state)

    # Outside of layers, then for each layer.
    base = {
        "weights": base_params * states.weight,
        "gradients": base_params * states.gradient,
        "optimizer": of_ends(states.optimizer),
        "activations": num_in_flight * kept_once,
        "buffers": (num_hops + num_sends_kept) * boundary
        + max(working_bytes(model, training, share, flash), logits_bytes)
        + attention_buffer_bytes(model, training, share, flash),
        "libraries": kept_free.libraries + overlap_buffer_bytes(model, training, share),
        "reserve": kept_free.reserve_beside(
            largest_tensor_bytes(model, training, share, flash, vocab_rows if last else 0)
        ),
    }
    # A stage in the middle has no batch, so each layer makes its mask itself.
    kept = layer_activation_bytes(model, training, share, flash, training.recompute)
    if not (first or last):
        kept += own_mask_bytes(model, training, share, flash)
    per_layer = {
        "weights": layer * states.weight,
        "gradients": layer * states.gradient,
        "optimizer": of_layer(states.optimizer),
        "activations": num_in_flight * kept,
        "buffers": layer * _FP8_COPIES_BYTES if training.fp8 else 0,
        "libraries": 0,
        "reserve": 0,
    }
    return StageMemory(
        base,
        per_layer,
        gpu.memory_bytes,
        update_base_bytes=of_ends(states.update),
        update_layer_bytes=of_layer(states.update),
    )


def _layer_states_bytes(
    model: ModelSpec, share: TensorShare, num_params: int, holders: StateHolders, state: int
) -> int:
    """Return the bytes of a layer's divided optimizer states; experts that are dealt out over
    replicas have as many holders as there are groups of them.

    Args:
        num_params: of the layer on this device.
        holders: that divide the states.
        state: bytes of a parameter.
    """
    # Layers without experts over replicas have one set of holders for all their states.
    num_holders, own_holders = holders.layers, holders.experts
    if not (share.expert_ranks or own_holders):
        return _ceil(num_params * state, num_holders)
    experts = expert_params(model, share)
    # The ranks of all holders, `num_holders` times the width, form groups of `expert_ranks` each.
    if own_holders is None:
        own_holders = max(1.0, num_holders * share.width / share.expert_ranks)
    return _ceil((num_params - experts) * state, num_holders) + _ceil(experts * state, own_holders)


def _of_kinds(model: ModelSpec, kinds: tuple[StageMemory, ...]) -> StageMemory:
    """Combine the memories of kinds of layers, see `StageMemory`."""
    # A quarter of the model in a row, where its heaviest layers are.
    window = -(-model.num_layers // 4)
    counts = max(
        (model.kind_counts(first, window) for first in range(model.num_layers - window + 1)),
        key=lambda c: sum(n * kind.bytes_per_layer for n, kind in zip(c, kinds, strict=True)),
    )
    return StageMemory(
        {part: max(kind.base[part] for kind in kinds) for part in kinds[0].base},
        {
            part: _ceil(
                sum(n * kind.per_layer[part] for n, kind in zip(counts, kinds, strict=True)), window
            )
            for part in kinds[0].per_layer
        },
        # One card for all kinds; the update has the heaviest base, and the mean of the window.
        kinds[0].capacity_bytes,
        kinds,
        max(kind.update_base_bytes for kind in kinds),
        _ceil(
            sum(n * kind.update_layer_bytes for n, kind in zip(counts, kinds, strict=True)), window
        ),
    )


def with_in_flight(model: ModelSpec, memory: StageMemory, num_in_flight: int) -> StageMemory:
    """Return a stage's memory with so many micro-batches, from the memory with a single one."""
    if memory.kinds:
        kinds = [with_in_flight(model, kind, num_in_flight) for kind in memory.kinds]
        return _of_kinds(model, tuple(kinds))
    # Only activations depend on the number in flight.
    part = "activations"
    return replace(
        memory,
        base={**memory.base, part: num_in_flight * memory.base[part]},
        per_layer={**memory.per_layer, part: num_in_flight * memory.per_layer[part]},
    )


def with_some_layers_recomputed(
    kept: StageMemory, recomputed: StageMemory, num_recomputed: int
) -> StageMemory:
    """Return a stage's memory with `num_recomputed` layers recomputed (`recompute_method=block`),
    from the memories with no layer and with all layers recomputed.

    Args:
        kept: the memory without recompute.
        recomputed: the memory where all layers are recomputed.
        num_recomputed: layers of the stage that are recomputed.
    """
    if kept.kinds:
        kinds = zip(kept.kinds, recomputed.kinds, strict=True)
        made = tuple(with_some_layers_recomputed(*pair, num_recomputed) for pair in kinds)
        # Which of its layers a stage recomputes is not known here: those that save least.
        base = {part: max(kind.base[part] for kind in made) for part in made[0].base}
        return replace(kept, base=base)
    # A straight line between both memories: each recomputed layer saves the same.
    part = "activations"
    saved = kept.per_layer[part] - recomputed.per_layer[part]
    base = {**recomputed.base, part: recomputed.base[part] - num_recomputed * saved}
    return replace(kept, base=base)


def tightest(memories: Sequence[StageMemory], num_layers: int) -> StageMemory:
    """Return the memory with the least to spare."""
    # Equal devices share one object, so most stages end here.
    if len(memories) == 1 or all(memory is memories[0] for memory in memories):
        return memories[0]
    return max(memories, key=lambda m: m.peak_bytes(num_layers) - m.capacity_bytes)


def updated_bytes(memory: StageMemory, num_layers: int, holders: StateHolders) -> float:
    """Sum the bytes of weights, gradients and states touched by a device's optimizer step.

    Args:
        memory: of the device.
        num_layers: of its stage.
        holders: devices that share the distributed optimizer's states.
    """
    # The holders divide the update of weights and gradients among themselves.
    parts = memory.parts_bytes(num_layers)
    copies = memory.update_base_bytes + num_layers * memory.update_layer_bytes
    return parts["optimizer"] + copies + (parts["weights"] + parts["gradients"]) / holders.layers


def _ceil(num: int, divisor: float) -> int:
    return math.ceil(num / divisor)
