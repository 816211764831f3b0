"""Nodes from `kubectl get nodes -o json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.kubernetes import nodes_from_kubernetes
from megatron_hetero.errors import ClusterError, FileFormatError

READY = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}]


def node(
    name: str,
    product: str | None,
    count: object = "4",
    memory: str | None = None,
    resource: str = "nvidia.com/gpu",
    **more: Any,
) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": name}
    if product is not None:
        labels["nvidia.com/gpu.product"] = product
    if memory is not None:
        labels["nvidia.com/gpu.memory"] = memory
    labels |= more.pop("labels", {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": more.pop("spec", {}),
        "status": {
            "allocatable": {"cpu": "64", resource: count},
            "conditions": more.pop("conditions", READY),
        },
    }


def written(tmp_path: Path, *items: Any) -> Path:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}))
    return path


def test_nodes_by_their_labels(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        node("a", "NVIDIA-A100-SXM4-80GB", "8", "81920"),
        node("b", "NVIDIA-GeForce-RTX-4090", 2, "24564"),
        node("t", "Tesla-T4", "1"),
        node("s", "NVIDIA-L40S-SHARED", "16", labels={"nvidia.com/gpu.count": "2"}),
        node("m", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "7"),
        node("cordoned", "Tesla-T4", "1", spec={"unschedulable": True}),
        node("lost", "Tesla-T4", "1", conditions=[{"type": "Ready", "status": "Unknown"}]),
        node("cpu", None, "0"),
        node("amd", None, "8", resource="amd.com/gpu",
             labels={"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM",
                     "amd.com/gpu.vram": "192G"}),
    )  # fmt: skip
    found = nodes_from_kubernetes(path, {})
    assert [(n.name, n.cards[0].gpu, n.count, n.site) for n in found.nodes] == [
        ("a", "A100-80GB", 8, "main"),
        ("b", "RTX-4090", 2, "main"),
        ("t", "T4", 1, "main"),
        ("s", "L40S", 2, "main"),
        ("amd", "MI300X", 8, "main"),
    ]
    said = "\n".join(found.notes)
    assert "s shares its GPUs in time" in said and "m is left out: its GPUs are cut" in said
    assert "cordoned is left out: it is cordoned" in said and "lost is left out: it is not" in said


def test_shared_gpus_count_once_whatever_label_says_so(tmp_path: Path) -> None:
    gke = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    path = written(
        tmp_path,
        node("one", "Tesla-T4", "4", labels={"nvidia.com/gpu.replicas": "1"}),
        node("none", "Tesla-T4", "4", labels={"nvidia.com/gpu.replicas": "0"}),
        node("sliced", "Tesla-T4", "32",
             labels={"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.count": "8"}),
        node("gke", None, "6", labels=gke | {"cloud.google.com/gke-max-shared-clients-per-gpu": "3",
                                             "cloud.google.com/gke-gpu-sharing-strategy": "mps"}),
        node("cut", None, "7", labels=gke | {"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}),
    )  # fmt: skip
    found = nodes_from_kubernetes(path, {})
    counts = {n.name: n.count for n in found.nodes}
    assert counts == {"one": 4, "none": 4, "sliced": 8, "gke": 2}
    assert "cut is left out: its GPUs are cut into parts (1g.5gb of nvidia-tesla-t4)" in found.notes


def test_shared_gpus_of_no_known_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="node s: '' is not a number of GPUs"):
        nodes_from_kubernetes(written(tmp_path, node("s", "NVIDIA-L40S-SHARED", "16")), {})


def test_init_writes_sites_of_regions(tmp_path: Path) -> None:
    region = "topology.kubernetes.io/region"
    path = written(
        tmp_path,
        node("1e3", "Tesla-T4", "2", labels={region: "eu-west-1"}),
        node("b.lab", "Tesla-T4", "2", labels={region: "eu-west-1"}),
        node("null", "NVIDIA-A10", "1", labels={region: "us-east-1"}),
    )
    output = tmp_path / "cluster.yaml"
    network = ["--between-sites", "eu-west-1,us-east-1=2 Gb/s,80 ms"]
    words = ["init", "--from-kubernetes", str(path), "-o", str(output)]
    assert main([*words, *network]) == 0
    cluster = load_cluster(output)
    assert [n.name for n in cluster.nodes] == ["1e3", "b.lab", "null"]
    assert [n.site for n in cluster.nodes] == ["eu-west-1", "eu-west-1", "us-east-1"]
    assert cluster.node_links["1e3", "null"].latency_s == pytest.approx(0.08)


def test_an_unknown_card_has_its_memory_and_question_marks(tmp_path: Path) -> None:
    path = written(tmp_path, node("a", "NVIDIA-GeForce-GTX-1080", "2", "8192"))
    output = tmp_path / "cluster.yaml"
    assert main(["init", "--from-kubernetes", str(path), "-o", str(output)]) == 0
    assert "GTX-1080: {memory: 8192 MiB" in output.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", 'no list "items"'),
        ("{}", 'no list "items"'),
        ('{"items": {}}', 'no list "items"'),
        ('{"items": [3]}', r"items\[0\] is not a node"),
        ('{"items": [{"kind": "Pod"}]}', r"items\[0\] is not a node"),
        ('{"items": [{}]}', "metadata.name: .*not a host name"),
        ('{"items": []}', "no node offers GPUs"),
        (json.dumps({"items": [node("$(reboot)", "Tesla-T4")]}), "not a host name"),
        (json.dumps({"items": [node("a", None)]}), "no label says which GPUs"),
        (json.dumps({"items": [node("a", "Tesla-T4", "-3")]}), "'-3' is not a number of GPUs"),
        (json.dumps({"items": [node("a", "Tesla-T4", "9" * 400)]}), "is not a number of GPUs"),
        (
            json.dumps({"items": [node("a", "A100")]}),
            "could be A100-40GB or A100-40GB-PCIe or A100-80GB",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words):
        nodes_from_kubernetes(path, {})


@pytest.mark.parametrize("text", ["", "kind: List", '{"a": 1, "a": 2}', "[" * 99, '{"a": NaN}'])
def test_what_is_no_strict_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"nodes\.json:"):
        nodes_from_kubernetes(path, {})


def test_too_many_gpus_in_a_node_leave_no_file(tmp_path: Path) -> None:
    output = tmp_path / "cluster.yaml"
    path = written(tmp_path, node("a", "Tesla-T4", "128"))
    assert main(["init", "--from-kubernetes", str(path), "-o", str(output)]) == 4
    assert not output.exists()
