"""Placements near an old plan: what stays, and what takes the place of what is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.replan import repair as module
from megatron_hetero.planner.replan.repair import OldReplica, near_placements, old_replicas
from megatron_hetero.planner.units import Unit, chains_of
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_cluster, make_workload, place

WORKLOAD = make_workload(num_layers=6, global_batch_size=8)
BOXES = make_cluster(("a", FAST, 2), ("b", SLOW, 2), ("c", SLOW, 2))


def without(*names: str) -> tuple[Problem, frozenset[str]]:
    """The problem with some devices idle, and the names of the others."""
    cluster: Cluster = replace(BOXES, limits=replace(AS_GIVEN, idle_devices=names))
    problem = make_problem(cluster, WORKLOAD)
    alive = frozenset(f"{node.name}:{i}" for node in problem.nodes for i in problem.gpus[node.name])
    return problem, alive


def unit(name: str, *indices: int) -> Unit:
    return Unit(name, indices)


OLD = place("tp2:4,tp1:2 @5 | tp1:3,tp1:3 @3", WORKLOAD, BOXES)  # a:0 a:1, b:0 | b:1, c:0


def test_what_is_left_of_a_plan_by_hand() -> None:
    problem, alive = without("b:0")
    first, second = old_replicas(problem, OLD, alive)
    assert first.stages == ((unit("a", 0, 1), 2, 4), (None, 1, 2))
    assert second.stages == ((unit("b", 1), 1, 3), (unit("c", 0), 1, 3))
    assert first.whole is None
    assert second.whole == ((unit("b", 1), 3), (unit("c", 0), 3))


def test_a_group_that_lost_a_gpu_is_narrower() -> None:
    problem, alive = without("a:0")
    first, _ = old_replicas(problem, OLD, alive)
    assert first.stages[0] == (unit("a", 1), 2, 4)
    assert first.whole is None


def placements(*lost: str) -> list[tuple[tuple[Unit, int], ...]]:
    problem, alive = without(*lost)
    return [
        tuple(
            (u, s.num_layers)
            for chain, r in zip(chains_of(p), p.replicas, strict=True)
            for u, s in zip(chain, r.stages, strict=True)
        )
        for p in near_placements(problem, old_replicas(problem, OLD, alive))
    ]


@pytest.mark.parametrize("lost", [("b:0",), ("a:0",), ("a",), ("b",), ("a:0", "c:0"), ()])
def test_placements_use_what_is_left_once_and_hold_the_model(lost: tuple[str, ...]) -> None:
    problem, alive = without(*lost)
    found = list(near_placements(problem, old_replicas(problem, OLD, alive)))
    assert found
    for placement in found:
        devices = [device.name for device in placement.devices()]
        assert len(devices) == len(set(devices)) and set(devices) <= alive
        assert sum(r.num_micro_batches for r in placement.replicas) == 8
        for replica in placement.replicas:
            assert sum(stage.num_layers for stage in replica.stages) == 6
            assert all(stage.num_layers >= 1 for stage in replica.stages)


def test_a_replica_that_lost_nothing_keeps_its_stages_and_layers() -> None:
    """In one of the placements; another may drop it from no list."""
    kept = ((unit("b", 1), 3), (unit("c", 0), 3))
    for found in placements("b:0"):
        assert kept[0] in found and kept[1] in found


def test_a_lost_stage_goes_to_free_gpus_or_its_neighbours() -> None:
    found = placements("b:0")
    first = (unit("a", 0, 1), 4)
    assert any(first in p and (unit("c", 1), 2) in p for p in found)  # in its place
    assert any((unit("a", 0, 1), 6) in p for p in found)  # its layers to the stage before
    assert any(all(u.node != "a" for u, _ in p) for p in found)  # dropped


def test_with_nothing_lost_the_old_plan_is_the_first() -> None:
    found = placements()
    assert found[0] == (
        (unit("a", 0, 1), 4), (unit("b", 0), 2), (unit("b", 1), 3), (unit("c", 0), 3)
    )  # fmt: skip


def test_free_gpus_may_form_replicas_of_their_own() -> None:
    found = placements()
    assert any((unit("c", 1), 6) in p and len(p) == 5 for p in found)


def test_layers_of_lost_stages_are_absorbed_by_hand() -> None:
    """Before, half and half, and behind; at the ends there is one neighbour."""
    a, c = unit("a", 0), unit("c", 0)
    middle = OldReplica(((a, 1, 2), (None, 1, 3), (c, 1, 1)))
    assert set(module._absorbed(middle)) == {
        ((a, 2), (c, 4)), ((a, 4), (c, 2)), ((a, 5), (c, 1))
    }  # fmt: skip
    first = OldReplica(((None, 1, 2), (c, 1, 4)))
    assert set(module._absorbed(first)) == {((c, 6),)}
    last = OldReplica(((a, 1, 2), (None, 1, 4)))
    assert set(module._absorbed(last)) == {((a, 6),)}
    assert list(module._absorbed(OldReplica(((None, 1, 6),)))) == []


def test_free_gpus_are_those_that_no_pipeline_uses() -> None:
    problem, _ = without("b:0")
    assert module._free(problem, []) == {"a": (0, 1), "b": (1,), "c": (0, 1)}
    used = [((unit("a", 0, 1), 4), (unit("c", 1), 2))]
    assert module._free(problem, used) == {"b": (1,), "c": (0,)}


def test_a_replacement_has_the_old_width_first() -> None:
    problem, _ = without()
    replica = OldReplica(((None, 2, 4), (unit("b", 0), 1, 2)))
    found = list(module._replaced(problem, replica, {"a": (0, 1), "c": (0, 1)}))
    assert [p[0][0].width for p in found] == [2, 2, 1, 1]
    assert all(p[0][1] == 4 and p[1] == (unit("b", 0), 2) for p in found)


def test_new_replicas_are_as_many_as_fit_alone_or_one_together() -> None:
    problem, _ = without()
    alone = module._new_replicas(OwnFlags(problem), "c", (0, 1), 1)
    assert alone == [((unit("c", 0), 6),), ((unit("c", 1), 6),)]
    small = replace(SLOW, memory_bytes=250 << 20)
    tight = make_problem(make_cluster(("c", small, 2)), WORKLOAD)
    together = module._new_replicas(OwnFlags(tight), "c", (0, 1), 1)
    assert [[u.indices for u, _ in p] for p in together] == [[(0,), (1,)]]


def test_chains_that_do_not_fit_or_are_not_allowed_are_empty() -> None:
    small = replace(SLOW, memory_bytes=60 << 20)
    tight = make_problem(make_cluster(("c", small, 2)), WORKLOAD)
    assert module._refitted(OwnFlags(tight), (unit("c", 0),)) == ()
    pinned = replace(BOXES, limits=replace(AS_GIVEN, first_stage_nodes=("a",)))
    problem = make_problem(pinned, WORKLOAD)
    assert module._refitted(OwnFlags(problem), (unit("c", 0),)) == ()
    assert module._refitted(OwnFlags(problem), (unit("a", 0),)) == ((unit("a", 0), 6),)


def test_so_many_ways_are_mended_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, alive = without("b:0", "c:0")
    every = list(near_placements(problem, old_replicas(problem, OLD, alive)))
    monkeypatch.setattr(module, "MAX_TRIED", 1)
    some = list(near_placements(problem, old_replicas(problem, OLD, alive)))
    assert 0 < len(some) < len(every)
