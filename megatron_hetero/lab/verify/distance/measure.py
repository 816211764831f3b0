"""Distance of the tensors of a rank and step from the tensors of the single process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy

from megatron_hetero.lab.verify.distance.adam import AdamSettings, explained_difference
from megatron_hetero.lab.verify.processes.record import SKIPPED, RankRecord
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.runtime.parallel.shards import ParameterShard

FLOOR_FACTOR = 4.0
"""The floor is a single change of the order of summation; a plan has several at once (over shards,
stages, replicas), each of about the same effect."""


@dataclass(frozen=True)
class Measure:
    """Measure of distances from the one process of `reference`."""

    model: ModelSpec
    optimizer: str
    reference: RankRecord
    adam: AdamSettings | None = None
    """Settings for removing Adam's part in the difference of unlike gradients (`distance.adam`)."""
    starts_apart: bool = False
    """True for a floor: weights that were moved at its start are subtracted as well."""
    _kept: dict[tuple[int, str], dict[int, numpy.ndarray]] = field(default_factory=dict)

    def tensors(self, record: RankRecord, step: int) -> Iterator[tuple[str, str, float, float]]:
        """Yield (kind, name, absolute distance, scale of the reference) of a step's tensors."""
        for name, shard in record.shards.items():
            explained = self._explained(record, name, shard).get(step)
            keys = key_bias_rows(name, self.model)
            for kind in ("gradient", "weight"):
                whole = self.reference.arrays[f"{kind}/{step}/{name}"]
                difference = record.arrays[f"{kind}/{step}/{name}"] - part_of(whole, shard)
                # Gradients at weights that have moved apart are compared by length only.
                if kind == "gradient" and not self._has_equal_gradients(step):
                    if self.adam is not None and self.reference.norms[step] != SKIPPED:
                        far = _length(_without(difference, keys))
                        yield "later gradient", name, far, _length(_without(whole, keys))
                    continue
                # What Adam makes of unlike gradients is not the plan's doing.
                if kind == "weight" and explained is not None:
                    difference = (difference - explained).astype(numpy.float32)
                    if self.starts_apart:
                        start = f"weight/0/{name}"
                        difference -= record.arrays[start] - part_of(
                            self.reference.arrays[start], shard
                        )
                # This rank has only the rounded weight, the one process the main weight.
                if kind == "weight" and name in record.rounded:
                    weights = part_of(whole, shard)
                    difference = _beyond_one_unit(difference, weights, record.rounded[name])
                # With Adam lengths beside the update since the start, otherwise largest elements.
                size = _largest
                if kind == "weight" and self.optimizer == "adam":
                    difference = _beyond_rounding(difference, part_of(whole, shard), step)
                    size, whole = _length, whole - self.reference.arrays[f"weight/0/{name}"]
                yield kind, name, size(_without(difference, keys)), size(_without(whole, keys))

    def _has_equal_gradients(self, step: int) -> bool:
        """Tell if the gradients of a step may be compared.

        They may not after an overflow; nor, with Adam, once weights have moved (see `Distances`).
        """
        if self.reference.norms[step] == SKIPPED:
            return False
        moved = (s for s in self.reference.steps if self.reference.norms[s] != SKIPPED)
        return self.optimizer != "adam" or step == next(moved)

    def _explained(
        self, record: RankRecord, name: str, shard: ParameterShard
    ) -> dict[int, numpy.ndarray]:
        if self.adam is None or self.optimizer != "adam":
            return {}
        # Adam runs over all steps at once, so the result is kept for the later ones.
        key = (id(record), name)
        if key not in self._kept:
            parts = {
                f"{kind}/{step}/{name}": part_of(array, shard)
                for kind in ("gradient", "weight")
                for step in (0, *self.reference.steps)
                if (array := self.reference.arrays.get(f"{kind}/{step}/{name}")) is not None
            }
            self._kept[key] = explained_difference(
                name, shard, record, parts, self.reference.norms, self.adam
            )
        return self._kept[key]

    def noise(self, floor: RankRecord) -> dict[tuple[str, str], float]:
        """Return, by (kind, name), the distance that is rounding.

        It may be large beside the tensor: a gradient that is the small rest of a large sum (of a
        norm of queries or keys, say) has the rounding of the sum.
        """
        worst: dict[tuple[str, str], float] = {}
        for step in floor.steps:
            for kind, name, difference, _ in self.tensors(floor, step):
                if kind == "weight" and self.adam is not None and self.optimizer == "adam":
                    # No chance is left in it that a floor would have to excuse.
                    continue
                noise = FLOOR_FACTOR * difference
                worst[kind, name] = max(worst.get((kind, name), 0.0), noise)
        return worst


def part_of(whole: numpy.ndarray, shard: ParameterShard) -> numpy.ndarray:
    """Return the part of a whole tensor that a shard holds."""
    parts = [
        whole[(slice(None),) * shard.dim + (slice(start, stop),)] for start, stop in shard.intervals
    ]
    return numpy.concatenate(parts, axis=shard.dim)


def _beyond_rounding(
    difference: numpy.ndarray, weights: numpy.ndarray, num_steps: int
) -> numpy.ndarray:
    """Reduce a difference between weights by the part explained by the weights' rounding.

    A step rounds each weight once, by at most half a unit in its last place, in both runs; so after
    `num_steps` equal steps they are up to `num_steps` units apart. This is small beside most
    updates. But the weights of a norm are about 1, and where gradients are small beside Adam's
    epsilon one unit (6e-8) is a thousandth of the whole tensor's update.
    """
    # Distance to the next fp32 number, of the larger of the two weights.
    unit = numpy.spacing(numpy.maximum(numpy.abs(weights), numpy.abs(weights + difference)))
    beyond: numpy.ndarray = numpy.maximum(numpy.abs(difference) - num_steps * unit, 0.0)
    # A NaN must stay one: numpy.maximum keeps it.
    return beyond


_UNIT_OVER_FP32 = {"torch.bfloat16": 2.0**16, "torch.float16": 2.0**13}


def _beyond_one_unit(
    difference: numpy.ndarray, weights: numpy.ndarray, dtype: str
) -> numpy.ndarray:
    """Reduce a difference by a unit in the last place of half precision; only the compared side is
    rounded, not the main weight."""
    # 2^16 or 2^13 units of fp32, and no less than fp16's smallest number.
    unit = numpy.maximum(numpy.spacing(numpy.abs(weights)) * _UNIT_OVER_FP32[dtype], 2.0**-24)
    beyond: numpy.ndarray = numpy.sign(difference) * numpy.maximum(
        numpy.abs(difference) - unit, 0.0
    )
    return beyond.astype(numpy.float32)


def _largest(tensor: numpy.ndarray) -> float:
    return float(numpy.abs(tensor).max()) if tensor.size else 0.0


def _length(tensor: numpy.ndarray) -> float:
    return float(numpy.linalg.norm(tensor))


_Rows = tuple[int, int, int]
"""(period, first, stop): rows whose number modulo `period` is in `first .. stop - 1`."""


def key_bias_rows(name: str, model: ModelSpec) -> _Rows | None:
    """Return the rows of a tensor that are biases of attention keys without a gradient, or None.

    Adding one vector to every key shifts all scores of a query alike, which softmax ignores. Such a
    bias has no gradient, unless positions or a norm come between the bias and the score.
    """
    # Rotary positions turn the bias of a key, which then has a gradient.
    if model.is_rotary:
        return None
    if name.endswith("k_layernorm.bias"):
        return 1, 0, 1
    if name.endswith("linear_qkv.bias") and not model.qk_layernorm:
        size = model.kv_channels
        # Rows of a group in Megatron's order: queries, then the key, then the value.
        queries = model.num_attention_heads // model.num_query_groups * size
        return queries + 2 * size, queries, queries + size
    return None


def _without(tensor: numpy.ndarray, rows: _Rows | None) -> numpy.ndarray:
    """Drop `rows` from a tensor. Shards hold whole query groups, so the period fits them too."""
    if rows is None:
        return tensor
    period, first, stop = rows
    place = numpy.arange(len(tensor)) % period
    return tensor[(place < first) | (place >= stop)]
