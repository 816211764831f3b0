"""How far a plan's training is from one process: each number worst over tensors, steps and ranks.

The bounds come from fp32 rounding: the two runs sum the same terms in another order.  `--floor`
measures how far one process is from itself when it takes its micro-batches in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.runtime.shards import ParameterShard
from megatron_hetero.runtime.verify.record import SKIPPED, RankRecord

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 5e-6
GATED_OR_GROUPED_TOLERANCE = 2e-5
"""Gradients of gated MLPs and grouped queries add up more terms of unlike sign."""
NORM_TOLERANCE = 2e-6
ADAM_UPDATE_TOLERANCE = 1e-3
"""Adam divides by the root of the second moment, which is rounding noise where a gradient is all
but zero; the update of a whole tensor is the number that means something."""
FLOOR_FACTOR = 4.0
"""The floor is one other order of summation; a plan has several at once (over shards, stages,
replicas), each of about that effect."""


@dataclass(frozen=True)
class Tolerances:
    loss: float
    gradients: float
    gradient_norm: float
    weights: float


def tolerances(model: ModelSpec, optimizer: str) -> Tolerances:
    """The bounds that a plan has to keep, by architecture and optimizer."""
    demanding = model.gated_mlp or model.num_query_groups != model.num_attention_heads
    gradients = GATED_OR_GROUPED_TOLERANCE if demanding else GRADIENT_TOLERANCE
    weights = gradients if optimizer == "sgd" else ADAM_UPDATE_TOLERANCE
    return Tolerances(LOSS_TOLERANCE, gradients, NORM_TOLERANCE, weights)


@dataclass(frozen=True)
class Worst:
    """A distance and where it was met."""

    value: float
    where: str = ""

    def or_worse(self, value: float, where: str) -> Worst:
        # `not (<=)` so that a NaN is the worst of all and stays it.
        return Worst(value, where) if not value <= self.value else self


@dataclass(frozen=True)
class Distances:
    """Relative distances of one run from another.

    `gradients` and (with SGD) `weights` are max|x - ref| / max|ref| of a tensor.  Adam moves a
    weight whose gradient is rounding noise by a full step in a random direction; so with Adam
    `weights` is |x - ref| / |ref - start| of a tensor, in the Euclidean norm and beyond the
    rounding of the weights (`_beyond_rounding`), and `gradients` are those of the first step,
    before any weight has moved (SGD compares them all).
    """

    loss: Worst
    gradients: Worst
    gradient_norm: Worst
    weights: Worst
    same_samples: bool
    same_norm_bits: bool
    same_random_states: bool
    """Whether the ranks of each tensor-parallel group ended with one random state: what they hold
    copies of they have to drop alike."""
    same_loss_scales: bool
    """Whether all ranks scaled every loss, and skipped every step, as the one process (fp16)."""
    left_out: tuple[str, ...]
    """Tensors of which the key biases were left out: their true gradient is zero (`key_bias_rows`),
    what is computed is noise, and Adam makes a full step of it."""

    def within(self, bounds: Tolerances) -> bool:
        return (
            self.loss.value <= bounds.loss
            and self.gradients.value <= bounds.gradients
            and self.gradient_norm.value <= bounds.gradient_norm
            and self.weights.value <= bounds.weights
            and self.same_samples
            and self.same_norm_bits
            and self.same_random_states
            and self.same_loss_scales
        )


def compare(
    reference: RankRecord,
    ranks: Sequence[RankRecord],
    data_ranks: Sequence[int],
    model: ModelSpec,
    optimizer: str,
    steps: range | None = None,
    floor: RankRecord | None = None,
    tensor_groups: Sequence[Sequence[int]] = (),
) -> Distances:
    """Distance of the run recorded by `ranks` from the one process of `reference`.

    Args:
        data_ranks: the ranks whose samples together are the global batch, one for each replica.
        steps: those that the run made, where it is a part of the reference's; None for all.
        floor: the one process in another order of summation.  A tensor no further off than
            `FLOOR_FACTOR` times that one's worst step counts as equal.
        tensor_groups: the ranks of each tensor-parallel group.
    Raises:
        CheckFailedError: a record is incomplete, so that there is nothing to compare.
    """
    steps = steps or range(1, len(reference.steps) + 1)
    _require_complete(reference, ranks, steps)
    measure = _Measure(model, optimizer, reference)
    noise = measure.noise(floor) if floor is not None else {}
    loss, gradients, norm, weights = _worst(measure, ranks, steps, noise)
    return Distances(
        loss,
        gradients,
        norm,
        weights,
        same_samples=_same_samples(reference, [ranks[r] for r in data_ranks], steps),
        same_norm_bits=all(record.norms == ranks[0].norms for record in ranks),
        same_random_states=all(
            len({ranks[rank].random_state for rank in group}) == 1 for group in tensor_groups
        ),
        same_loss_scales=all(_scaled_alike(record, reference, steps) for record in ranks),
        left_out=tuple(n for n in reference.shards if key_bias_rows(n, model)),
    )


def half_precision_tolerances(
    reference: RankRecord, single: RankRecord, model: ModelSpec, optimizer: str
) -> Tolerances:
    """What a plan in bf16 or fp16 has to keep, from the one process in it and in fp32 (`single`).

    Tensors are held to the same factor by `compare` with `single` for its floor.
    """
    loss, _, norm, _ = rounding_of(reference, single, model, optimizer)
    return replace(
        tolerances(model, optimizer),
        loss=FLOOR_FACTOR * loss.value,
        gradient_norm=FLOOR_FACTOR * norm.value,
    )


def rounding_of(
    reference: RankRecord, single: RankRecord, model: ModelSpec, optimizer: str
) -> tuple[Worst, Worst, Worst, Worst]:
    """How far half precision moves one process: loss, gradients, norm and weights of `reference`
    from `single`, the same in fp32 (without the steps that an overflow skipped)."""
    return _worst(_Measure(model, optimizer, reference), [single], single.steps, {})


def _worst(
    measure: _Measure,
    ranks: Sequence[RankRecord],
    steps: Sequence[int],
    noise: Mapping[tuple[str, str], float],
) -> tuple[Worst, Worst, Worst, Worst]:
    """The worst of losses, gradients, norms and weights; tensors within their `noise` are equal."""
    reference = measure.reference
    loss = norm = Worst(0.0)
    tensors = {"gradient": Worst(0.0), "weight": Worst(0.0)}
    for rank, record in enumerate(ranks):
        for step in steps:
            where = f"step {step}, rank {rank}"
            if step in record.losses:
                loss = loss.or_worse(_relative(record.losses[step], reference.losses[step]), where)
            if SKIPPED not in (record.norms[step], reference.norms[step]):
                at, due = (float.fromhex(r.norms[step]) for r in (record, reference))
                norm = norm.or_worse(_relative(at, due), where)
            for kind, name, difference, scale in measure.tensors(record, step):
                if difference <= noise.get((kind, name), 0.0):
                    continue
                distance = difference / scale if scale else difference
                tensors[kind] = tensors[kind].or_worse(distance, f"{name}, {where}")
    return loss, tensors["gradient"], norm, tensors["weight"]


@dataclass(frozen=True)
class _Measure:
    """How far tensors are from the one process of `reference`."""

    model: ModelSpec
    optimizer: str
    reference: RankRecord

    def tensors(self, record: RankRecord, step: int) -> Iterator[tuple[str, str, float, float]]:
        """(kind, name, absolute distance, scale of the reference) of all tensors of a step."""
        for name, shard in record.shards.items():
            keys = key_bias_rows(name, self.model)
            for kind in ("gradient", "weight"):
                if kind == "gradient" and not self._has_equal_gradients(step):
                    continue
                whole = self.reference.arrays[f"{kind}/{step}/{name}"]
                difference = record.arrays[f"{kind}/{step}/{name}"] - _part(whole, shard)
                size = _largest
                if kind == "weight" and self.optimizer == "adam":
                    difference = _beyond_rounding(difference, _part(whole, shard), step)
                    size, whole = _length, whole - self.reference.arrays[f"weight/0/{name}"]
                yield kind, name, size(_without(difference, keys)), size(_without(whole, keys))

    def _has_equal_gradients(self, step: int) -> bool:
        """Not where they overflowed; with Adam, not after weights have moved (see `Distances`)."""
        if self.reference.norms[step] == SKIPPED:
            return False
        moved = (s for s in self.reference.steps if self.reference.norms[s] != SKIPPED)
        return self.optimizer != "adam" or step == next(moved)

    def noise(self, floor: RankRecord) -> dict[tuple[str, str], float]:
        """By (kind, name) the distance that is rounding, whatever the tensor's own size.

        A gradient that is the small rest of a large sum (of a norm of queries or keys, say) has
        the rounding of the sum.
        """
        worst: dict[tuple[str, str], float] = {}
        for step in floor.steps:
            for kind, name, difference, _ in self.tensors(floor, step):
                noise = FLOOR_FACTOR * difference
                worst[kind, name] = max(worst.get((kind, name), 0.0), noise)
        return worst


def _require_complete(reference: RankRecord, ranks: Sequence[RankRecord], steps: range) -> None:
    if not steps or not any(record.losses for record in ranks):
        raise CheckFailedError("no losses were recorded; the runs did not train")
    if reference.steps != tuple(range(1, len(reference.steps) + 1)):
        raise CheckFailedError(f"the one process recorded steps {reference.steps}")
    if set(reference.losses) != set(reference.steps):
        raise CheckFailedError("the one process did not report the loss of every step")
    covered = {name for record in ranks for name in record.shards}
    if missing := sorted(set(reference.shards) - covered):
        raise CheckFailedError(f"no rank of the plan holds {', '.join(missing)}")
    for rank, record in enumerate(ranks):
        if record.steps != tuple(steps):
            raise CheckFailedError(f"rank {rank} recorded steps {record.steps}, not {tuple(steps)}")
        if record.losses and set(record.losses) != set(steps):
            raise CheckFailedError("a rank of a last stage did not report the loss of every step")


def _scaled_alike(record: RankRecord, reference: RankRecord, steps: range) -> bool:
    return all(
        record.loss_scales[step] == reference.loss_scales[step]
        and (record.norms[step] == SKIPPED) == (reference.norms[step] == SKIPPED)
        for step in steps
    )


def _part(whole: numpy.ndarray, shard: ParameterShard) -> numpy.ndarray:
    """The part of a whole tensor that a shard stands for."""
    parts = [
        whole[(slice(None),) * shard.dim + (slice(start, stop),)] for start, stop in shard.intervals
    ]
    return numpy.concatenate(parts, axis=shard.dim)


def _beyond_rounding(
    difference: numpy.ndarray, weights: numpy.ndarray, num_steps: int
) -> numpy.ndarray:
    """What of a difference between weights their own rounding does not explain.

    A step rounds each weight once, by half a unit in its last place at most, in both runs; so after
    `num_steps` equal steps they are up to `num_steps` units apart.  That is nothing beside most
    updates, but the weights of a norm are about 1, and where gradients are small beside Adam's
    epsilon one unit (6e-8) is a thousandth of the whole tensor's update.
    """
    unit = numpy.spacing(numpy.maximum(numpy.abs(weights), numpy.abs(weights + difference)))
    beyond: numpy.ndarray = numpy.maximum(numpy.abs(difference) - num_steps * unit, 0.0)
    # A NaN must stay one: numpy.maximum keeps it.
    return beyond


def _relative(x: float, ref: float) -> float:
    return abs(x - ref) / abs(ref) if ref else abs(x - ref)


def _largest(tensor: numpy.ndarray) -> float:
    return float(numpy.abs(tensor).max()) if tensor.size else 0.0


def _length(tensor: numpy.ndarray) -> float:
    return float(numpy.linalg.norm(tensor))


_Rows = tuple[int, int, int]
"""(period, first, stop): rows whose number modulo `period` is in `first .. stop - 1`."""


def key_bias_rows(name: str, model: ModelSpec) -> _Rows | None:
    """Which rows of a tensor are biases of attention keys without a gradient; None: no rows.

    Adding one vector to every key shifts all scores of a query alike, which softmax ignores; so
    such a bias has no gradient, unless positions or a norm come between the bias and the score.
    """
    if model.position_embedding == "rope":
        return None
    if name.endswith("k_layernorm.bias"):
        return 1, 0, 1
    if name.endswith("linear_qkv.bias") and not model.qk_layernorm:
        size = model.kv_channels
        queries = model.num_attention_heads // model.num_query_groups * size
        return queries + 2 * size, queries, queries + size
    return None


def _without(tensor: numpy.ndarray, rows: _Rows | None) -> numpy.ndarray:
    """The tensor without `rows`.  Shards hold whole query groups, so the period fits them too."""
    if rows is None:
        return tensor
    period, first, stop = rows
    place = numpy.arange(len(tensor)) % period
    return tensor[(place < first) | (place >= stop)]


def _same_samples(reference: RankRecord, replicas: Sequence[RankRecord], steps: range) -> bool:
    """Whether every step's global batch is the same set of samples."""
    expected = _by_step(reference.samples, len(reference.steps))
    parts = [_by_step(record.samples, len(steps)) for record in replicas]
    if not expected or not all(parts):
        return False
    return all(
        sorted(expected[step - 1]) == sorted(s for part in parts for s in part[k])
        for k, step in enumerate(steps)
    )


def _by_step(samples: list[int], num_steps: int) -> list[list[int]]:
    """The samples of each step; no steps if they cannot be divided."""
    if not samples or len(samples) % num_steps:
        return []
    size = len(samples) // num_steps
    return [samples[k * size : (k + 1) * size] for k in range(num_steps)]
