"""Result of a verification: the distances and bounds of every optimizer, also as JSON data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hetero.lab.verify.distance.compare import Distances, Tolerances
from megatron_hetero.lab.verify.distance.traffic import boundaries_to_data, sync_to_data
from megatron_hetero.lab.verify.processes.routing import Flips
from megatron_hetero.lab.verify.small.job_flags import NO_FLAGS, JobFlags
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.parallel.traffic import BoundaryTraffic, RankTraffic


@dataclass(frozen=True)
class Routing:
    """Tokens sent to unlike experts by the plan and by the single process.

    `allowed_margin` is the difference between two scores that rounding explains.
    """

    flips: Flips
    allowed_margin: float

    @property
    def ok(self) -> bool:
        return self.flips.margin <= self.allowed_margin


@dataclass(frozen=True)
class Comparison:
    """Runs of one optimizer. `floor` is the distance of one process from itself.

    `losses` are (one process, plan) for each step.
    """

    distances: Distances
    bounds: Tolerances
    losses: tuple[tuple[float, float], ...]
    floor: Distances | None
    traffic: tuple[RankTraffic, ...] = ()
    """Traffic of the plan's ranks."""
    boundaries: tuple[Mapping[int, BoundaryTraffic], ...] = ()
    """[rank] -> its traffic by boundary."""
    routing: Routing | None = None

    @property
    def ok(self) -> bool:
        is_routed = self.routing is None or self.routing.ok
        return self.distances.within(self.bounds) and is_routed


@dataclass(frozen=True)
class Verification:
    """Trained runs and their distances, by optimizer.

    `notes` name the options that differ from the job.
    """

    shrunk: Shrunk
    comparisons: Mapping[str, Comparison]
    flags: JobFlags = NO_FLAGS
    notes: tuple[str, ...] = ()
    layers: str = ""
    """Layers that both trained with, in words."""

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons.values())


def outcome_to_data(outcome: Verification) -> dict[str, Any]:
    """Return `loss, gradients, gradient_norm, weights, tolerance, ok`, and explanatory data.

    With several optimizers each number is the worst of them against its tolerance; `runs` has all.
    """
    plan = outcome.shrunk.plan
    runs = {o: _comparison_to_data(plan, c) for o, c in outcome.comparisons.items()}
    worst = {
        key: max(runs.values(), key=lambda run: run[key] / run["tolerance"][key])
        for key in _NUMBERS
    }
    return {
        **{key: run[key] for key, run in worst.items()},
        "tolerance": {key: run["tolerance"][key] for key, run in worst.items()},
        "ok": outcome.ok,
        "layout": format_layout(plan.layout),
        "layers": outcome.layers,
        "shrunk": [*outcome.shrunk.changes, *outcome.flags.shrunk, *outcome.notes],
        "flags": {
            "kept": list(outcome.flags.kept),
            "added": list(outcome.flags.added),
            "no_effect": {note: list(names) for note, names in outcome.flags.no_effect.items()},
            "left_out": [{"flag": f, "reason": why} for f, why in outcome.flags.left_out],
        },
        "runs": runs,
    }


_NUMBERS = ("loss", "gradients", "gradient_norm", "weights")


def _comparison_to_data(plan: Plan, comparison: Comparison) -> dict[str, Any]:
    d = comparison.distances
    return {
        **_values(d),
        "tolerance": {key: getattr(comparison.bounds, key) for key in _NUMBERS},
        "ok": comparison.ok,
        "same_samples": d.same_samples,
        "same_norm_bits_on_all_ranks": d.same_norm_bits,
        "same_random_states_in_groups": d.same_random_states,
        "own_random_states_of_regions": d.own_region_states,
        "same_loss_scales": d.same_loss_scales,
        "same_initial_weights": d.unequal_start is None,
        "unequal_initial_weights": d.unequal_start,
        "unlike_distribution_of_initial_weights": d.unlike_draw,
        "unequal_holders": d.unequal_holder,
        "unlike_log": d.unlike_log,
        "later_gradients": {
            "found": d.later_gradients.value,
            "allowed": comparison.bounds.later_gradients,
            "where": d.later_gradients.where,
        },
        "worst": {key: getattr(d, key).where for key in _NUMBERS},
        "left_out_of_weights": list(d.left_out),
        "losses": [{"one_process": a, "plan": b} for a, b in comparison.losses],
        "floor": None if comparison.floor is None else _values(comparison.floor),
        "gradient_sync": sync_to_data(comparison.traffic),
        "boundaries": boundaries_to_data(plan, comparison.boundaries),
        "routing": comparison.routing
        and {
            "flipped": comparison.routing.flips.num_flipped,
            "tokens": comparison.routing.flips.num_tokens,
            "margin": comparison.routing.flips.margin,
            "allowed_margin": comparison.routing.allowed_margin,
            "ok": comparison.routing.ok,
        },
    }


def _values(distances: Distances) -> dict[str, float]:
    return {key: getattr(distances, key).value for key in _NUMBERS}
