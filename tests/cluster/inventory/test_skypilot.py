"""Nodes from SkyPilot's task files, our own launch files among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.skypilot import nodes_from_skypilot
from megatron_hetero.errors import ClusterError, FileFormatError

GOLDEN = Path(__file__).parents[2] / "flags" / "golden" / "skypilot"


def written(tmp_path: Path, text: str, name: str = "task.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("resources: {accelerators: H100:8}", [("H100-80GB", 8)]),
        ("num_nodes: 2\nresources: {accelerators: {A100-80GB: 4}}", [("A100-80GB", 4)] * 2),
        ("resources: {accelerators: RTX4090}", [("RTX-4090", 1)]),
        ("resources: {accelerators: [A100:8, 'H100:8']}", [("A100-40GB", 8)]),
        ("resources: {any_of: [{accelerators: L4:2}, {accelerators: T4:4}]}", [("L4", 2)]),
        ("resources: {ordered: [{accelerators: {V100: 4}}]}", [("V100-16GB", 4)]),
    ],
)
def test_accelerators_in_each_of_their_forms(
    tmp_path: Path, text: str, wanted: list[tuple[str, int]]
) -> None:
    found = nodes_from_skypilot([written(tmp_path, text)], {})
    assert [(node.cards[0].gpu, node.count) for node in found.nodes] == wanted
    was_chosen = any("the first is taken" in note for note in found.notes)
    assert was_chosen == ("[A100" in text or "T4:4" in text)


def test_our_own_launch_files_come_back_as_the_machines_they_rent(tmp_path: Path) -> None:
    output = tmp_path / "cluster.yaml"
    tasks = [str(path) for path in sorted(GOLDEN.glob("part-*.yaml"))]
    assert len(tasks) == 2
    assert main(["init", "--from-skypilot", *tasks, "-o", str(output)]) == 0
    nodes = load_cluster(output).nodes
    assert len({node.gpu_type.name for node in nodes}) == 2


def test_clouds_are_sites(tmp_path: Path) -> None:
    tasks = [
        written(tmp_path, "name: a\nresources: {infra: aws/us-east-1, accelerators: L4:1}", "a"),
        written(tmp_path, "name: a\nresources: {cloud: gcp, accelerators: L4:1}", "b"),
    ]
    found = nodes_from_skypilot(tasks, {})
    assert [(n.name, n.site) for n in found.nodes] == [("a-0", "aws-us-east-1"), ("a-1-0", "gcp")]


def test_nothing_of_a_task_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"run: touch {mark}\nsetup: $(touch {mark})\nresources: {{accelerators: T4:1}}"
    nodes_from_skypilot([written(tmp_path, text)], {})
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "not a SkyPilot task"),
        ("run: ls", "resources.*: the task names no GPUs"),
        ("resources: {instance_type: p3.8xlarge}", "names no GPUs"),
        ("resources: {accelerators: 'H100:0.5'}", "not NAME:COUNT with whole GPUs"),
        ("resources: {accelerators: 'H100:0'}", "not NAME:COUNT with whole GPUs"),
        ("resources: {accelerators: 'H100; reboot:2'}", "not NAME:COUNT"),
        ("resources: {accelerators: {H100: [8]}}", "not NAME:COUNT"),
        ("num_nodes: 0\nresources: {accelerators: L4}", ":1: num_nodes: 0 is not"),
        ("num_nodes: true\nresources: {accelerators: L4}", "num_nodes: True is not"),
        ("num_nodes: 99999\nresources: {accelerators: L4}", "num_nodes: 99999 is not"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        nodes_from_skypilot([written(tmp_path, text)], {})


@pytest.mark.parametrize("text", ["a: &x 1\nb: *x", "a: !!python/object 1", "a: 1\n---\na: 2"])
def test_what_is_no_plain_yaml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileFormatError, match=r"task\.yaml:"):
        nodes_from_skypilot([written(tmp_path, text)], {})
