"""Real rehearsals agree with the simulation, and disagree when they alone are disturbed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.arguments import with_sends
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.rehearse import capacity
from megatron_hetero.lab.rehearse.links.network import SlowLink
from megatron_hetero.lab.rehearse.rehearsal import Rehearsal, rehearsal_to_data
from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.faults.limits import DEFAULT_STALL_S
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.schedule.simulator.test_step import placed

LINK = Link(2e9, 2e-3)


def mixed_cluster() -> Cluster:
    return make_cluster(("a", FAST, 1), ("b", SLOW, 2), between=LINK)


def mixed_plan(count: int = 4, ahead: int | None = None) -> Plan:
    sizes = {"hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}
    plan = placed(f"tp1:3,tp2:1 @{count}", ["a:0", "b:0", "b:1"], tied_embeddings=False, **sizes)
    plan = with_hosts(plan, mixed_cluster())
    if ahead is None:
        return plan
    (replica,) = plan.replicas
    first = replace(replica.stages[0], num_launched_forwards=ahead)
    return replace(plan, replicas=(replace(replica, stages=(first, *replica.stages[1:])),))


def with_hosts(plan: Plan, cluster: Cluster) -> Plan:
    from megatron_hetero.plan.build import canonical_hosts

    return replace(plan, hosts=canonical_hosts(plan.replicas, cluster))


def run(plan: Plan, folder: Path, **options: object) -> Rehearsal:
    return rehearse(plan, mixed_cluster(), None, RehearsalOptions(steps=1, **options), folder)  # type: ignore[arg-type]


def test_prediction_and_rehearsal_agree(tmp_path: Path) -> None:
    found = run(mixed_plan(), tmp_path)
    assert abs(found.error) < 0.08, rehearsal_to_data(found, mixed_plan())
    (stages,) = found.stages
    for stage, predicted in zip(stages, found.predicted.stages[0], strict=True):
        computed = [o for o in stage.operations if o.micro_batch >= 0]
        assert [(o.kind, o.micro_batch) for o in computed] == [
            (o.kind, o.micro_batch) for o in predicted.operations if o.micro_batch >= 0
        ]
        assert stage.busy_s == pytest.approx(predicted.busy_s, rel=0.02)
    data = rehearsal_to_data(found, mixed_plan())
    assert data["num_ranks"] == 3
    assert {line.name for line in found.lines} == {"a -> b", "b -> a"}
    for line in found.lines:
        assert line.predicted_s == pytest.approx(line.rehearsed_s, rel=1e-6)
    assert {m.operation.kind for m in found.messages} == {"send_forward", "send_backward"}


@pytest.mark.parametrize(
    ("layout", "chain"),
    [
        # So do those whose exchanges `test_exchange` looks at.
        pytest.param("tp1:2,tp1:2 @4", [0, 1, 0, 1], marks=pytest.mark.slow),
        ("tp1:2,tp1:2,tp1:2 @3", [0, 1, 2, 0, 1, 2]),
    ],
    ids=["some pass in the steady state", "all in the warm-up of the first stage"],
)
def test_stock_megatrons_interleaved_stages_are_rehearsed(
    layout: str, chain: list[int], tmp_path: Path
) -> None:
    """They run by its own schedule, in the simulated order, and wait where it does there."""
    sizes = {"hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}
    devices = ["a:0", "b:0", "b:1"][: max(chain) + 1]
    plan = placed(layout, devices, tied_embeddings=False, num_layers=len(chain), **sizes)
    layers = [(stage, 1) for stage in chain]
    plan = with_hosts(with_interleaving(plan, 0, layers), mixed_cluster())
    assert is_stock(plan)
    found = run(plan, tmp_path)
    assert found.is_stock
    assert abs(found.error) < 0.03, rehearsal_to_data(found, plan)
    (stages,) = found.stages
    for stage, predicted in zip(stages, found.predicted.stages[0], strict=True):
        orders = [
            [(o.kind, o.micro_batch, o.chunk) for o in s.operations if o.micro_batch >= 0]
            for s in (stage, predicted)
        ]
        assert orders[0] == orders[1]


@pytest.mark.slow
def test_a_stretched_phase_may_last_longer_than_training_stands_still(tmp_path: Path) -> None:
    """The watch of a job allows 40 s, and knows nothing of the time scale."""
    plan, wait_s = mixed_plan(1), DEFAULT_STALL_S + 8
    operations = simulate_plan(plan, mixed_cluster()).stages[0][0].operations
    forward, backward, _ = operations
    scale = wait_s / (backward.start_s - forward.end_s)
    found = run(plan, tmp_path, time_scale=scale)
    assert found.time_scale == scale and abs(found.error) < 0.03


def test_a_stock_plan_with_buffered_sends_is_rehearsed_in_our_runtime(tmp_path: Path) -> None:
    """Prediction and processes both go on after a send, where stock Megatron would wait."""
    sizes = {"hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}
    plan = placed("tp1:3,tp1:1 @4", ["a:0", "b:0"], tied_embeddings=False, **sizes)
    plan = with_hosts(plan, mixed_cluster())
    assert is_stock(plan) and plan.workload is not None
    found = run(replace(plan, workload=with_sends(plan.workload, "buffered")), tmp_path)
    assert not found.is_stock and found.predicted.sends == "buffered"
    assert abs(found.error) < 0.08, rehearsal_to_data(found, plan)
    waiting_s = simulate_plan(plan, mixed_cluster()).step_time_s
    assert waiting_s > 1.1 * found.predicted.step_time_s


@pytest.mark.parametrize(
    "options",
    [
        {"slow_ranks": {0: 2.0}},
        {"slow_links": (SlowLink("a", "b", 3.0),)},
        {"rehearsed_plan": mixed_plan()},
    ],
    ids=["a slower rank", "late messages", "another order"],
)
def test_what_disturbs_the_rehearsal_alone_shows(
    options: dict[str, object], tmp_path: Path
) -> None:
    """The prediction knows nothing of it, so it must be too short."""
    plan = mixed_plan(ahead=4) if "rehearsed_plan" in options else mixed_plan()
    assert run(plan, tmp_path, **options).error < -0.1


def test_more_ranks_than_this_machine_rehearses_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "most_ranks", lambda: 2)
    with pytest.raises(EnvironmentMismatchError, match=r"takes 3 processes.*up to 2"):
        run(mixed_plan(), tmp_path)


def test_faults_name_ranks_and_nodes_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ranks 0 to 2"):
        run(mixed_plan(), tmp_path, slow_ranks={3: 2.0})
    with pytest.raises(UsageError, match="no node c"):
        run(mixed_plan(), tmp_path, slow_links=(SlowLink("a", "c", 2.0),))
