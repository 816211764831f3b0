"""The memory of a stage's device as a function of its layers, and such memories combined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.work.speed import cast_bytes, gathered_cast_bytes, owned_cast_bytes
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


@value(frozen=True)
class StageMemory:
    """Bytes on one device of a stage: `base_bytes` without any layer, and what each layer adds.

    Both are split by cause; keys are those of `DeviceEstimate.parts_bytes`.  Of a model with
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


def of_kinds(model: ModelSpec, kinds: tuple[StageMemory, ...]) -> StageMemory:
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
            part: part_of(
                sum(n * kind.per_layer[part] for n, kind in zip(counts, kinds, strict=True)), window
            )
            for part in kinds[0].per_layer
        },
        # One card for all kinds; the update has the heaviest base, and the mean of the window.
        kinds[0].capacity_bytes,
        kinds,
        max(kind.update_base_bytes for kind in kinds),
        part_of(
            sum(n * kind.update_layer_bytes for n, kind in zip(counts, kinds, strict=True)), window
        ),
    )


def with_in_flight(
    model: ModelSpec, memory: StageMemory, num_in_flight: int, libraries: int
) -> StageMemory:
    """Return a stage's memory with so many micro-batches, and with so many bytes more for
    libraries, from the memory with a single micro-batch."""
    if memory.kinds:
        kinds = [with_in_flight(model, kind, num_in_flight, libraries) for kind in memory.kinds]
        return of_kinds(model, tuple(kinds))
    # Only activations and communicators depend on the number in flight.
    base, per_layer = dict(memory.base), dict(memory.per_layer)
    base["activations"] *= num_in_flight
    base["libraries"] += libraries
    per_layer["activations"] *= num_in_flight
    return StageMemory(
        base,
        per_layer,
        memory.capacity_bytes,
        update_base_bytes=memory.update_base_bytes,
        update_layer_bytes=memory.update_layer_bytes,
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


def update_traffic_bytes(
    memory: StageMemory, num_layers: int, holders: StateHolders, training: TrainingSpec
) -> float:
    """Sum the bytes that a device's optimizer step reads and writes, as Megatron-core 0.19 takes
    it with Megatron's default `--clip-grad 1.0`.

    Args:
        memory: of the device.
        num_layers: of its stage.
        holders: devices that share the distributed optimizer's states.
        training: of the job.
    """
    parts = memory.parts_bytes(num_layers)
    weights, gradients = parts["weights"], parts["gradients"]
    # The whole buffer is zeroed, checked for NaN and scaled before the sum over replicas.
    whole = (4 if _scales_gradients(holders, training) else 2) * gradients
    # The holders divide the rest: the norm and the optimizer read each gradient.  Clipping reads
    # and writes it; by local layers only at the steps that clip, which are not counted, with
    # Transformer Engine at every step (`clip_grad_by_total_norm_fp32` has a tensor then).
    uses = 2 if training.local_layers else 4
    # Where an fp32 copy is made first, all this is done to the copy, and the gradient is read once.
    copies = memory.update_base_bytes + num_layers * memory.update_layer_bytes
    own = (1 + uses) * copies + (1 if copies else uses) * gradients / holders.layers
    # States are read and written; the fp32 weight is read again, and written in 16 bits.  Where
    # Adam has only the other half of it, the weight is read and written.
    moved = 2 if training.updates_in_place else 3
    if training.has_fp8_weights:
        # A weight in fp8 is a byte, so what is lacking says how many there are.
        in_full = gradients // training.gradient_bytes * training.element_bytes
        in_fp8 = (in_full - weights) // (training.element_bytes - 1)
        own += (moved * in_full + in_fp8 * owned_cast_bytes(training)) / holders.layers
        copied = num_layers * memory.per_layer["buffers"]
        return whole + own + gathered_cast_bytes(training, in_fp8, copied) + 2 * parts["optimizer"]
    own += moved * weights / holders.layers
    # In fp8 the next step casts the weights of layers once, each device its own.
    cast = num_layers * memory.per_layer["weights"] / 2 * cast_bytes(training)
    return whole + own + cast + 2 * parts["optimizer"]


def _scales_gradients(holders: StateHolders, training: TrainingSpec) -> bool:
    """Return whether a step multiplies every gradient: by a part of the replicas before their sum
    (`_ParamAndGradBucketGroup.start_grad_sync` of Megatron-core 0.19), or by one over the tokens
    behind it (`finalize_model_grads`).

    Replicas are known by the states that they divide: without the distributed optimizer what
    several of them scale is not counted.
    """
    return training.per_token_loss or 1 < holders.layers < math.inf


def part_of(num: int, divisor: float) -> int:
    """Return a part of so many bytes, rounded up."""
    return math.ceil(num / divisor)
