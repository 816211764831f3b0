"""What was not measured is priced by how the model says it differs from what was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.pieces import PieceTimes
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.planner import plan_and_explain
from tests.cost.builders import FAST, FREE, make_cluster, make_workload
from tests.cost.work.test_profile import point, write

SLOWER = 3.0
"""Than the model says; `forward` by half as much again."""
PIECES = "embedding", "decoder_layer", "head"


def cluster(num_gpus: int = 1) -> Cluster:
    return make_cluster(("a", FAST, num_gpus))


def modelled(width: int = 1, **changes: Any) -> PieceTimes:
    wide = cluster(width)
    return CostModel(wide, make_workload(**changes)).pieces(wide.nodes[0], width, 1024)


def measured(path: Path, width: int = 1, **changes: Any) -> Profile:
    """A machine that takes 4.5 times as long as the model says forward, and 3 times backward."""
    pieces = modelled(width, **changes)
    times = pieces.embedding, pieces.layer, pieces.head
    points = [
        point(
            piece=piece,
            tensor_parallel=width,
            forward_s=1.5 * SLOWER * of.forward_s,
            backward_s=SLOWER * of.backward_s,
            **changes,
        )
        for piece, of in zip(PIECES, times, strict=True)
    ]
    return load_profile(write(path / "profile.json", *points))


def gauged(profile: Profile, width: int = 1, **changes: Any) -> PieceTimes:
    wide = cluster(width)
    return CostModel(wide, make_workload(**changes), profile).pieces(wide.nodes[0], width, 1024)


def approx(forward_s: float, backward_s: float) -> Any:
    return pytest.approx((forward_s, backward_s))


def both(times: PassTimes) -> tuple[float, float]:
    return times.forward_s, times.backward_s


def test_a_larger_micro_batch_is_as_much_slower_as_the_model_says(tmp_path: Path) -> None:
    large = modelled(micro_batch_size=4).layer
    found = gauged(measured(tmp_path), micro_batch_size=4)
    assert both(found.layer) == approx(4.5 * large.forward_s, 3 * large.backward_s)
    assert not found.measured


def test_recomputing_a_layer_takes_its_measured_forward_pass_again(tmp_path: Path) -> None:
    profile, plain = measured(tmp_path), modelled().layer
    found = gauged(profile, recompute="full")
    assert both(found.layer) == approx(
        4.5 * plain.forward_s, 3 * plain.backward_s + 4.5 * plain.forward_s
    )
    some = gauged(profile, recompute="selective").layer
    assert gauged(profile).layer.backward_s < some.backward_s < found.layer.backward_s


def test_a_layer_measured_with_recomputation_is_priced_without(tmp_path: Path) -> None:
    found, plain = gauged(measured(tmp_path, recompute="full")), modelled().layer
    again_s = 4.5 * plain.forward_s
    backward_s = 3 * (plain.backward_s + plain.forward_s) - again_s
    assert both(found.layer) == approx(4.5 * plain.forward_s, backward_s)


def test_between_unlike_widths_communication_is_the_models(tmp_path: Path) -> None:
    profile, wide = measured(tmp_path), modelled(2)
    found, comm = gauged(profile, 2), wide.communication
    assert comm.forward_s > 0
    assert both(found.layer) == approx(
        4.5 * (wide.layer.forward_s - comm.forward_s) + comm.forward_s,
        3 * (wide.layer.backward_s - comm.backward_s) + comm.backward_s,
    )
    assert both(found.communication) == approx(*both(comm))


def test_what_the_model_flatters_is_not_chosen_for_it(tmp_path: Path) -> None:
    """The machine is slower than described, and only the job's own settings were measured: each
    other setting that the model prices for itself would seem faster than they are."""
    profile = measured(tmp_path)
    free = make_cluster(("a", FAST, 1), limits=FREE)
    plan, _ = plan_and_explain(free, make_workload(), profile=profile)
    (stage,) = plan.replicas[0].stages
    assert stage.recompute in (None, "none")
    same, _ = plan_and_explain(free, make_workload())
    assert plan.replicas == same.replicas
    assert plan.estimates is not None and same.estimates is not None
    # Its pieces take three times as long; update, launches and the tied weight's sum do not.
    assert plan.estimates.step_time_s > 2.7 * same.estimates.step_time_s
