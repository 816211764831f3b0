"""Changes of a job and its cluster: which there are, and in which order."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.advise.capacity import MoreGpus
from megatron_hetero.planner.advise.nothing_fits.relaxations import (
    FULL_RECOMPUTE,
    larger_nodes,
    limit_changes,
    more_words,
    nodes_to_copy,
    settings_changes,
    with_more,
)
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import AS_GIVEN, FAST, FREE, OLD, SLOW, make_cluster, make_workload

BOXES = make_cluster(("a", FAST, 4), ("b", SLOW, 2))


def changes(cluster: Cluster = BOXES, **job: object) -> list[str]:
    workload = make_workload(**{"global_batch_size": 8, "micro_batch_size": 4, **job})  # type: ignore[arg-type]
    return [s.words for s in settings_changes(make_problem(cluster, workload))]


def test_the_unchanged_job_comes_first_then_the_smallest_changes() -> None:
    found = changes()
    assert found[:4] == [
        "",
        "--micro-batch-size 2 instead of 4",
        "--micro-batch-size 1 instead of 4",
        "--sequence-parallel",
    ]
    assert len(found) == len(set(found)) == 3 * 2 * 3
    assert sorted(found, key=lambda words: words.count(" and ")) == found


def test_settings_say_what_their_words_say() -> None:
    workload = make_workload(global_batch_size=8, micro_batch_size=4)
    for settings in settings_changes(make_problem(BOXES, workload)):
        training, words = settings.training, settings.words
        assert ("--sequence-parallel" in words) == training.sequence_parallel
        assert (FULL_RECOMPUTE in words) == (training.recompute == "full")
        assert ("granularity selective" in words) == (training.recompute == "selective")
        size = next((s for s in (2, 1) if f"--micro-batch-size {s} " in words), 4)
        assert training.micro_batch_size == size
        named = (size != 4) + training.sequence_parallel + (training.recompute != "none")
        assert settings.num_changes == named


def test_what_plans_choose_by_themselves_is_no_change() -> None:
    free = replace(BOXES, limits=FREE)
    assert changes(free) == ["", "--sequence-parallel"]


def test_what_the_job_does_already_is_no_change() -> None:
    found = changes(sequence_parallel=True, recompute="selective", micro_batch_size=1)
    assert found == ["", FULL_RECOMPUTE]
    assert changes(sequence_parallel=True, recompute="full", micro_batch_size=1) == [""]


def test_fp16_is_offered_where_some_gpu_lacks_bf16() -> None:
    old = make_cluster(("a", FAST, 1), ("old", OLD, 1))
    assert "--fp16 instead of --bf16" in changes(old)
    assert "--fp16 instead of --bf16" not in changes(old, precision="fp16")
    assert not any("--fp16" in words for words in changes())


def limited(**limits: object) -> dict[str, Limits]:
    cluster = replace(BOXES, limits=replace(AS_GIVEN, **limits))  # type: ignore[arg-type]
    found = list(limit_changes(cluster))
    assert len(found) == len(dict(found))
    return dict(found)


def test_no_limits_no_changes() -> None:
    assert limited() == {}


def test_widths_up_to_the_largest_node() -> None:
    found = limited(max_tensor_parallel=2)
    assert {w: limits.max_tensor_parallel for w, limits in found.items()} == {
        "limits.max_tensor_parallel 3 instead of 2": 3,
        "limits.max_tensor_parallel 4 instead of 2": 4,
    }


def test_fewer_replicas_one_by_one() -> None:
    found = limited(num_replicas=3)
    assert [limits.num_replicas for limits in found.values()] == [2, 1]


def test_other_limits_are_lifted() -> None:
    for limits, field, lifted in (
        ({"max_pipeline_parallel": 2}, "max_pipeline_parallel", None),
        ({"idle_devices": ("a:0",)}, "idle_devices", ()),
        ({"first_stage_nodes": ("a",)}, "first_stage_nodes", ()),
        ({"last_stage_nodes": ("a",)}, "last_stage_nodes", ()),
        ({"no_tensor_parallel_across": ("nodes", "b")}, "no_tensor_parallel_across", ("nodes",)),
    ):
        (changed,) = limited(**limits).values()
        assert getattr(changed, field) == lifted
        assert replace(changed, **{field: limits[field]}) == replace(AS_GIVEN, **limits)  # type: ignore[index,arg-type]


def test_two_limits_are_lifted_by_themselves_then_together() -> None:
    found = limited(max_tensor_parallel=3, idle_devices=("a:0",))
    words = list(found)
    assert words[-1] == f"{words[0]} and {words[1]}" and len(words) == 3
    assert found[words[-1]] == replace(AS_GIVEN, max_tensor_parallel=4)
    # Two steps of one limit are no pair.
    assert all(" and " not in w for w in limited(num_replicas=4))


def test_nodes_to_copy_are_the_largest_of_each_type() -> None:
    cluster = make_cluster(("a", SLOW, 2), ("b", SLOW, 4), ("c", FAST, 1), ("old", OLD, 8))
    training = make_workload().training
    assert [node.name for node in nodes_to_copy(cluster.nodes, training)] == ["c", "b"]
    half = replace(training, precision="fp16")
    assert {node.name for node in nodes_to_copy(cluster.nodes, half)} == {"c", "b", "old"}
    assert [(n.name, n.num_gpus) for n in larger_nodes(cluster.nodes, half)] == [("c", 8), ("b", 8)]


def more(num_gpus: int, node_name: str = "b", size: int | None = None) -> MoreGpus:
    node = BOXES.node_by_name[node_name]
    return MoreGpus(node if size is None else replace(node, num_gpus=size), num_gpus)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 7])
def test_more_gpus_come_in_machines_like_the_one(num_gpus: int) -> None:
    larger = with_more(BOXES, more(num_gpus))
    added = larger.nodes[2:]
    assert sum(node.num_gpus for node in added) == num_gpus
    assert len(added) == ceil(num_gpus / 2)
    assert all(node.gpu_type == SLOW and node.num_gpus <= 2 for node in added)
    names = [node.name for node in larger.nodes]
    assert len(set(names)) == len(names)
    for one in names:
        for other in names:
            assert one == other or (one, other) in larger.node_links


def test_added_machines_are_joined_as_their_like_is() -> None:
    links = {
        pair: Link(1e8, 1e-3) if "b" in pair and "c" in pair else link
        for pair, link in make_cluster(
            ("a", FAST, 4), ("b", SLOW, 2), ("c", SLOW, 2)
        ).node_links.items()
    }
    nodes = make_cluster(("a", FAST, 4), ("b", SLOW, 2), ("c", SLOW, 2)).nodes
    larger = with_more(replace(BOXES, nodes=nodes, node_links=links), more(4))
    one, other = (node.name for node in larger.nodes[3:])
    assert larger.node_links[one, "a"] == links["b", "a"]
    assert larger.node_links[one, "c"] == Link(1e8, 1e-3)
    assert larger.node_links[one, "b"] == Link(1e8, 1e-3)  # the slowest that b has
    assert larger.node_links[one, other] == Link(1e8, 1e-3)


def test_a_machine_alone_is_joined_by_its_own_link() -> None:
    alone = make_cluster(("a", FAST, 2))
    larger = with_more(alone, MoreGpus(alone.nodes[0], 2))
    assert larger.node_links["a", larger.nodes[1].name] == alone.nodes[0].link


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (more(2), "2 more SLOW: 1 more machine like b (2x SLOW)"),
        (more(4), "4 more SLOW: 2 more machines like b (2x SLOW each)"),
        (more(5), "5 more SLOW: 2 more machines like b (2x SLOW each) and one with 1x SLOW"),
        (more(1), "1 more SLOW: one more machine with 1x SLOW, linked as machine b is"),
        (more(12, size=8), "12 more SLOW: in machines of 8, linked as machine b is"),
        (more(4, size=8), "4 more SLOW: in one machine, linked as machine b is"),
    ],
)
def test_words_for_more_gpus(of: MoreGpus, words: str) -> None:
    assert more_words(BOXES, of) == words
