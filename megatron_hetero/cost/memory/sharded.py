"""Bytes on a device of a stage with sharded layers, whose weights and gradients the replicas
divide.

One of these layers at a time is whole, with its gradients; then, without its weights, with what the
other holders have sent.  Where exchanges overlap, the weights of one layer more are there, and the
gradients of a third are on their way.  Where checkpoints are saved or read all of them have whole
weights, and there are no activations.  Each of these two moments takes a straight line in the
numbers of layers; the peak is the greater one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.model.training import TrainingSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardedMemory:
    """A device's parts of the sharded layers, and the device's memory with these.

    Attributes:
        part: of their weights and gradients that the device keeps (its optimizer's states are
            divided already).
        is_cut_alike: all holders cut the layer alike; if not, it is packed for each exchange.
        sums_apart: gradients travel in 16 bits, and are summed in a buffer of their own.
        overlaps: exchanges travel while other layers compute (`--overlap-param-gather`).
    """

    part: float
    is_cut_alike: bool = True
    sums_apart: bool = False
    overlaps: bool = False

    def of(self, whole: StageMemory, num_sharded: int, num_layers: int) -> StageMemory:
        """Return the memory of a device that keeps a part of some layers.

        Args:
            whole: the memory with all layers whole.
            num_sharded: layers of which it keeps a part, at least 1.
            num_layers: of its stage.
        """
        # One layer's whole weights and gradients, and the moment when exchanges hold the most.
        weights, gradients = whole.per_layer["weights"], whole.per_layer["gradients"]
        gathered = self._gathered_bytes(whole, num_sharded > 1)
        # A checkpoint gathers all weights when activations and buffers of passes are free: only the
        # excess counts.
        free = gathered + sum(
            whole.base[part] + num_layers * whole.per_layer[part]
            for part in ("activations", "buffers")
        )
        base = dict(whole.base)
        base["weights"] -= math.floor(num_sharded * weights * (1 - self.part))
        base["gradients"] -= math.floor(num_sharded * gradients * (1 - self.part))
        base["buffers"] += gathered + max(0, num_sharded * weights - free)
        return replace(whole, base=base)

    def lines(self, whole: StageMemory, num_sharded: Ints, num_layers: Ints) -> tuple[Ints, Ints]:
        """Return the bytes while passes are computed, and at the fuller of the other two moments
        (a checkpoint is saved; the optimizer works), of any numbers of layers at once: the greater
        is the peak of `of`.

        Args:
            whole: the memory with all layers whole.
            num_sharded: layers of which it keeps a part, or 0, shape [1, sharded].
            num_layers: of its stage, shape [layers, 1].
        """
        weights, gradients = whole.per_layer["weights"], whole.per_layer["gradients"]
        # Both lines start from whole layers; the parts of the other holders then go.
        states = whole.base_bytes + num_layers * whole.bytes_per_layer
        base, layer = whole.updating_line
        updating = base + num_layers * layer
        for size in (weights, gradients):
            others = np.floor(num_sharded * size * (1 - self.part)).astype(np.int64)
            states, updating = states - others, updating - others
        # When a checkpoint is saved there are no activations and no buffers of passes.
        given_back = sum(
            whole.base[part] + num_layers * whole.per_layer[part]
            for part in ("activations", "buffers")
        )
        one, more = [self._gathered_bytes(whole, is_more) for is_more in (False, True)]
        # Shape [1, sharded]: none, one, or several sharded layers.
        gathered = np.where(num_sharded > 1, more, np.where(num_sharded > 0, one, 0))
        saving = states + num_sharded * weights - given_back
        return states + gathered, np.maximum(saving, updating)

    def _gathered_bytes(self, whole: StageMemory, several: bool) -> int:
        """Return the bytes of sharded layers that are whole for a moment, of a single layer or of
        several."""
        weights, gradients = whole.per_layer["weights"], whole.per_layer["gradients"]
        sums = math.ceil(2 * self.part * gradients) if self.sums_apart else 0
        # Where exchanges overlap: weights of two layers, or of one and the sums, with gradients of
        # three.
        if self.overlaps and several:
            gathered = weights + 3 * gradients + max(weights, sums)
            # Packed: what arrives is beside its place, what leaves beside gradients that leave as
            # they are.
            return gathered + (0 if self.is_cut_alike else weights + gradients)
        sent = gradients if self.is_cut_alike else 2 * gradients
        return gradients + max(weights, sent + sums)


def sharded_memory(
    training: TrainingSpec, num_holders: float, *, is_cut_alike: bool
) -> ShardedMemory:
    """Return what a job's devices keep of sharded layers.

    Args:
        training: the job's.
        num_holders: replicas that divide each of them equally.
        is_cut_alike: as of `ShardedMemory`.
    """
    return ShardedMemory(
        1 / num_holders,
        is_cut_alike=is_cut_alike,
        sums_apart=state_bytes(training).gradient < 4,
        overlaps=training.overlap_param_gather,
    )
