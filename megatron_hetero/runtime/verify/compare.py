"""How far a plan's training is from one process: each number worst over tensors, steps and ranks.

The bounds come from fp32 rounding: the two runs sum the same terms in another order.  `--floor`
measures how far one process is from itself when it takes its micro-batches in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.runtime.shards import ParameterShard
from megatron_hetero.runtime.verify.record import RankRecord

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 5e-6
GATED_OR_GROUPED_TOLERANCE = 2e-5
"""Gradients of gated MLPs and grouped queries add up more terms of unlike sign."""
NORM_TOLERANCE = 2e-6
ADAM_UPDATE_TOLERANCE = 1e-3
"""Adam divides by the root of the second moment, which is rounding noise where a gradient is all
but zero; the update of a whole tensor is the number that means something."""


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
    `weights` is |x - ref| / |ref - start| of a tensor, in the Euclidean norm, and `gradients` are
    those of the first step, before any weight has moved (SGD compares them all).
    """

    loss: Worst
    gradients: Worst
    gradient_norm: Worst
    weights: Worst
    same_samples: bool
    same_norm_bits: bool
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
        )


def compare(
    reference: RankRecord,
    ranks: Sequence[RankRecord],
    data_ranks: Sequence[int],
    model: ModelSpec,
    optimizer: str,
) -> Distances:
    """Distance of the run recorded by `ranks` from the one process of `reference`.

    Args:
        data_ranks: the ranks whose samples together are the global batch, one for each replica.
    Raises:
        CheckFailedError: a record is incomplete, so that there is nothing to compare.
    """
    steps = range(1, reference.num_steps + 1)
    _require_complete(reference, ranks)
    loss = norm = gradients = weights = Worst(0.0)
    for rank, record in enumerate(ranks):
        for step in steps:
            where = f"step {step}, rank {rank}"
            if step in record.losses:
                loss = loss.or_worse(_relative(record.losses[step], reference.losses[step]), where)
            norm = norm.or_worse(
                _relative(float.fromhex(record.norms[step]), float.fromhex(reference.norms[step])),
                where,
            )
            for name, shard, x, ref in _pairs(reference, record, "gradient", step):
                if optimizer == "adam" and step > 1:
                    break
                distance = _max_norm(x, ref, shard, key_bias_rows(name, model))
                gradients = gradients.or_worse(distance, f"{name}, {where}")
            for name, shard, x, ref in _pairs(reference, record, "weight", step):
                start = reference.arrays[f"weight/0/{name}"]
                keys = key_bias_rows(name, model)
                distance = (
                    _max_norm(x, ref, shard, keys)
                    if optimizer == "sgd"
                    else _update_norm(x, ref, start, shard, keys)
                )
                weights = weights.or_worse(distance, f"{name}, {where}")
    return Distances(
        loss,
        gradients,
        norm,
        weights,
        same_samples=_same_samples(reference, [ranks[r] for r in data_ranks]),
        same_norm_bits=all(record.norms == ranks[0].norms for record in ranks),
        left_out=tuple(n for n in reference.shards if key_bias_rows(n, model)),
    )


def _require_complete(reference: RankRecord, ranks: Sequence[RankRecord]) -> None:
    steps = set(range(1, reference.num_steps + 1))
    last_stages = [record.losses for record in ranks if record.losses]
    if not steps or not last_stages:
        raise CheckFailedError("no losses were recorded; the runs did not train")
    if any(set(losses) != steps for losses in (reference.losses, *last_stages)):
        raise CheckFailedError("a rank of a last stage did not report the loss of every step")
    covered = {name for record in ranks for name in record.shards}
    if missing := sorted(set(reference.shards) - covered):
        raise CheckFailedError(f"no rank of the plan holds {', '.join(missing)}")
    for rank, record in enumerate(ranks):
        if record.num_steps != reference.num_steps:
            raise CheckFailedError(
                f"rank {rank} recorded {record.num_steps} steps, the one process "
                f"{reference.num_steps}"
            )


def _pairs(
    reference: RankRecord, record: RankRecord, kind: str, step: int
) -> Iterator[tuple[str, ParameterShard, numpy.ndarray, numpy.ndarray]]:
    for name, shard in record.shards.items():
        key = f"{kind}/{step}/{name}"
        yield name, shard, record.arrays[key], reference.arrays[key]


def _part(whole: numpy.ndarray, shard: ParameterShard) -> numpy.ndarray:
    """The part of a whole tensor that a shard stands for."""
    parts = [
        whole[(slice(None),) * shard.dim + (slice(start, stop),)] for start, stop in shard.intervals
    ]
    return numpy.concatenate(parts, axis=shard.dim)


def _relative(x: float, ref: float) -> float:
    return abs(x - ref) / abs(ref) if ref else abs(x - ref)


def _max_norm(
    x: numpy.ndarray, whole: numpy.ndarray, shard: ParameterShard, keys: _Rows | None
) -> float:
    difference, whole = _without(x - _part(whole, shard), keys), _without(whole, keys)
    if not whole.size:
        return 0.0
    scale = float(numpy.abs(whole).max())
    distance = float(numpy.abs(difference).max())
    return distance / scale if scale else distance


def _update_norm(
    x: numpy.ndarray,
    whole: numpy.ndarray,
    start: numpy.ndarray,
    shard: ParameterShard,
    keys: _Rows | None,
) -> float:
    difference, update = _without(x - _part(whole, shard), keys), _without(whole - start, keys)
    scale = float(numpy.linalg.norm(update))
    distance = float(numpy.linalg.norm(difference))
    return distance / scale if scale else distance


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


def _same_samples(reference: RankRecord, replicas: Sequence[RankRecord]) -> bool:
    """Whether every step's global batch is the same set of samples."""
    num_steps = reference.num_steps
    per_step = [_steps(reference.samples, num_steps)] + [
        _steps(record.samples, num_steps) for record in replicas
    ]
    if any(len(steps) != num_steps for steps in per_step):
        return False
    expected, *parts = per_step
    return all(
        sorted(expected[k]) == sorted(s for part in parts for s in part[k])
        for k in range(num_steps)
    )


def _steps(samples: list[int], num_steps: int) -> list[list[int]]:
    if not samples or len(samples) % num_steps:
        return []
    size = len(samples) // num_steps
    return [samples[k * size : (k + 1) * size] for k in range(num_steps)]
