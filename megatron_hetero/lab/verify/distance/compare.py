"""Distance of a plan's training from one process: the worst over tensors, steps and ranks.

The bounds come from fp32 rounding: the two runs sum the same terms in another order. `--floor`
measures the distance of one process from itself with its micro-batches in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.lab.verify.distance.adam import AdamSettings
from megatron_hetero.lab.verify.distance.holders import first_unequal_holder
from megatron_hetero.lab.verify.distance.initial import first_unlike_draw
from megatron_hetero.lab.verify.distance.measure import Measure, key_bias_rows
from megatron_hetero.lab.verify.distance.norm import norm_distance, norm_span
from megatron_hetero.lab.verify.distance.start import Rounding, first_unequal_start
from megatron_hetero.lab.verify.processes.record import SKIPPED, RankRecord
from megatron_hetero.model.spec import ModelSpec

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 5e-6
GATED_OR_GROUPED_TOLERANCE = 2e-5
"""Gradients of gated MLPs and grouped queries add up more terms of unlike sign."""
NORM_TOLERANCE = 2e-6
ADAM_UPDATE_TOLERANCE = 1e-3
"""Adam divides by the root of the second moment, which is rounding noise where a gradient is all
but zero; the update of a whole tensor is the number that means something."""
ADAM_ARITHMETIC_TOLERANCE = 5e-6
"""Part of the update, after the part that Adam makes of unlike gradients is removed
(`distance.adam`)."""
LATER_GRADIENT_TOLERANCE = 1e-3
"""Gradients of Adam's later steps, relative to their length: the weights that they are taken at
are apart by less than a thousandth of an update (`ADAM_UPDATE_TOLERANCE`), and gradients follow
weights; 2e-6 was the most that was seen. A wrong sum is far greater."""


@dataclass(frozen=True)
class Tolerances:
    """Largest distances that count as equal.

    Those of the loss and the gradient norm are relative to themselves; those of gradients and
    updates of weights are relative to the largest element of a tensor.
    """

    loss: float
    gradients: float
    gradient_norm: float
    weights: float
    later_gradients: float = LATER_GRADIENT_TOLERANCE


def tolerances(model: ModelSpec, optimizer: str, is_explained: bool = False) -> Tolerances:
    """Return the bounds that a plan has to keep, by architecture and optimizer.

    Args:
        model: the small model.
        optimizer: "sgd" or "adam".
        is_explained: the part that Adam makes of unlike gradients is removed (`compare`'s `adam`).
    """
    # Architectures whose gradients sum terms of unlike sign.
    demanding = model.gated_mlp or model.num_query_groups != model.num_attention_heads
    gradients = GATED_OR_GROUPED_TOLERANCE if demanding else GRADIENT_TOLERANCE
    of_adam = ADAM_ARITHMETIC_TOLERANCE if is_explained else ADAM_UPDATE_TOLERANCE
    weights = gradients if optimizer == "sgd" else of_adam
    return Tolerances(LOSS_TOLERANCE, gradients, NORM_TOLERANCE, weights)


@dataclass(frozen=True)
class Worst:
    """A distance, and the place where it was met."""

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
    `weights` is |x - ref| / |ref - start| of a tensor, in the Euclidean norm, beyond the rounding
    of the weights (`_beyond_rounding`) and beyond what unlike gradients explain, and
    `gradients` are those of the first step, before any weight has moved (SGD compares them all);
    `later_gradients` are those of Adam's other steps, |x - ref| / |ref| in the Euclidean norm.
    """

    loss: Worst
    gradients: Worst
    gradient_norm: Worst
    weights: Worst
    same_samples: bool
    same_norm_bits: bool
    same_random_states: bool
    """True if the ranks of each tensor-parallel group ended with one random state: they have to
    drop their copies alike."""
    own_region_states: bool
    """True if in each of these groups every rank ended with a state of its own for what the group
    divides: heads and parts of sequences must not be dropped alike."""
    same_loss_scales: bool
    """True if all ranks scaled every loss, and skipped every step, as the one process did
    (fp16)."""
    left_out: tuple[str, ...]
    """Tensors without their key biases: the true gradient of these is zero (`key_bias_rows`),
    the computed one is noise, and Adam makes a full step of it."""
    unequal_start: str | None = None
    """First tensor that a rank was built with other initial weights of (`distance.start`)."""
    later_gradients: Worst = Worst(0.0)
    unequal_holder: str | None = None
    """First weight that its holders have in unlike bits after a step (`distance.holders`)."""
    unlike_draw: str | None = None
    """First initial weights of another distribution than Megatron's own (`distance.initial`)."""
    unlike_log: str | None = None
    """First number that the log prints otherwise (`distance.log`)."""

    def within(self, bounds: Tolerances) -> bool:
        return (
            self.loss.value <= bounds.loss
            and self.gradients.value <= bounds.gradients
            and self.gradient_norm.value <= bounds.gradient_norm
            and self.weights.value <= bounds.weights
            and self.same_samples
            and self.same_norm_bits
            and self.same_random_states
            and self.own_region_states
            and self.same_loss_scales
            and self.later_gradients.value <= bounds.later_gradients
            and self.unequal_start is None
            and self.unequal_holder is None
            and self.unlike_draw is None
            and self.unlike_log is None
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
    adam: AdamSettings | None = None,
    is_drawn_alike: bool = True,
    starts_apart: bool = False,
    rounding: Rounding | None = None,
) -> Distances:
    """Compute the distance of the run recorded by `ranks` from the one process of `reference`.

    Args:
        reference: the record of the one process.
        ranks: the records of the run, by rank.
        data_ranks: the ranks whose samples together are the global batch, one for each replica.
        model: the small model.
        optimizer: "sgd" or "adam".
        steps: steps of the run, where it is a part of the reference's; None for all.
        floor: the one process in another order of summation. A tensor no further off than
            `FLOOR_FACTOR` times its worst step there counts as equal.
        tensor_groups: the ranks of each tensor-parallel group.
        adam: settings with which the part that Adam makes of unlike gradients is removed
            (`distance.adam`).
        is_drawn_alike: initial weights equal the one process's too, not only those of other ranks.
        starts_apart: the run is a floor, whose weights were moved on purpose at the start.
        rounding: as in `first_unequal_start`.
    Raises:
        CheckFailedError: a record is incomplete, so that there is nothing to compare.
    """
    # What is compared has to be there on all ranks.
    steps = steps or range(1, len(reference.steps) + 1)
    _require_complete(reference, ranks, steps)
    # Distances by tensor, of which the worst counts; noise is what rounding explains.
    measure = Measure(model, optimizer, reference, adam, starts_apart)
    noise = measure.noise(floor) if floor is not None else {}
    loss, gradients, norm, weights, later = _worst(measure, ranks, steps, noise)
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
        own_region_states=all(
            len({ranks[rank].region_state for rank in group}) == len(group)
            for group in tensor_groups
        ),
        same_loss_scales=all(_scaled_alike(record, reference, steps) for record in ranks),
        left_out=tuple(n for n in reference.shards if key_bias_rows(n, model)),
        unequal_start=first_unequal_start(reference, ranks, is_drawn_alike, rounding),
        later_gradients=later,
        unequal_holder=first_unequal_holder(ranks, steps),
        unlike_draw=first_unlike_draw(reference) if is_drawn_alike else None,
    )


def rounding_of(
    reference: RankRecord, single: RankRecord, model: ModelSpec, optimizer: str
) -> tuple[Worst, Worst, Worst, Worst]:
    """Measure how far half precision moves one process, in loss, gradients, norm and weights.

    `single` is the same process as `reference`, in fp32 and without the steps that an overflow
    skipped.
    """
    return _worst(Measure(model, optimizer, reference), [single], single.steps, {})[:4]


def _worst(
    measure: Measure,
    ranks: Sequence[RankRecord],
    steps: Sequence[int],
    noise: Mapping[tuple[str, str], float],
) -> tuple[Worst, Worst, Worst, Worst, Worst]:
    """Find the worst losses, gradients, norms, weights and later gradients; tensors within `noise`
    are equal."""
    reference = measure.reference
    loss = norm = Worst(0.0)
    tensors = dict.fromkeys(("gradient", "weight", "later gradient"), Worst(0.0))
    spans = {s: norm_span(reference, s) for s in steps if reference.norms[s] != SKIPPED}
    # Every rank and step against the one process's part of the same tensor.
    for rank, record in enumerate(ranks):
        for step in steps:
            where = f"step {step}, rank {rank}"
            if step in record.losses:
                loss = loss.or_worse(relative(record.losses[step], reference.losses[step]), where)
            if SKIPPED not in (record.norms[step], reference.norms[step]):
                at = float.fromhex(record.norms[step])
                norm = norm.or_worse(norm_distance(at, spans[step]), where)
            for kind, name, difference, scale in measure.tensors(record, step):
                if difference <= noise.get((kind, name), 0.0):
                    continue
                # Relative, but for a tensor that is all zero in the reference.
                distance = difference / scale if scale else difference
                tensors[kind] = tensors[kind].or_worse(distance, f"{name}, {where}")
    return loss, tensors["gradient"], norm, tensors["weight"], tensors["later gradient"]


def _require_complete(reference: RankRecord, ranks: Sequence[RankRecord], steps: range) -> None:
    if not steps or not any(record.losses for record in ranks):
        raise CheckFailedError("no losses were recorded; the runs did not train")
    # The reference trains from the first step to the last, without a gap.
    if reference.steps != tuple(range(1, len(reference.steps) + 1)):
        raise CheckFailedError(f"the one process recorded steps {reference.steps}")
    if set(reference.losses) != set(reference.steps):
        raise CheckFailedError("the one process did not report the loss of every step")
    # Together the ranks hold every tensor of the model.
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


def relative(x: float, ref: float) -> float:
    """Return the distance of a number from its reference, as a part of the latter."""
    return abs(x - ref) / abs(ref) if ref else abs(x - ref)


def _same_samples(reference: RankRecord, replicas: Sequence[RankRecord], steps: range) -> bool:
    """Check that every step's global batch is the same set of samples."""
    expected = _by_step(reference.samples, len(reference.steps))
    parts = [_by_step(record.samples, len(steps)) for record in replicas]
    if not expected or not all(parts):
        return False
    return all(
        sorted(expected[step - 1]) == sorted(s for part in parts for s in part[k])
        for k, step in enumerate(steps)
    )


def _by_step(samples: list[int], num_steps: int) -> list[list[int]]:
    """Divide the samples into steps; return no steps if that is impossible."""
    if not samples or len(samples) % num_steps:
        return []
    size = len(samples) // num_steps
    return [samples[k * size : (k + 1) * size] for k in range(num_steps)]
