"""Lists in forms that sites print: by each the machines that it means, or a refusal with line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.inventory.kubernetes import nodes_from_kubernetes
from megatron_hetero.cluster.inventory.skypilot import nodes_from_skypilot
from megatron_hetero.cluster.inventory.slurm import nodes_from_slurm
from megatron_hetero.errors import ClusterError


@pytest.mark.parametrize(
    ("gres", "cards"),
    [
        # Whole cards beside slices, shards, tmpfs, licences; sockets and IDX behind.
        ("gpu:nvidia_h100_80gb_hbm3:6(S:0-1),gpu:nvidia_h100_80gb_hbm3_1g.10gb:14",
         ["6xH100-80GB"]),
        ("gpu:nvidia_a100-sxm4-40gb:2,gpu:a100_3g.20gb:4,gpu:a100_1g.5gb:7", ["2xA100-40GB"]),
        ("gpu:a100-pcie-80gb:2(S:1),shard:a100-pcie-80gb:16", ["2xA100-80GB-PCIe"]),
        ("tmpfs:900G,gpu:nvidia_l40s:4(S:0-1)", ["4xL40S"]),
        ("gpu:rtx_4090:1(S:0),gpu:rtx_3090:2(S:1),license:matlab:4", ["1xRTX-4090", "2xRTX-3090"]),
        ("gpu:h200:8(IDX:0-7)", ["8xH200"]),
        ("gpu:tesla_t4:16", ["16xT4"]),
        ("gpu:quadro_rtx_6000:4(S:0)", ["4xQuadro-RTX-6000"]),
        ("gpu:mi300x:8(S:0-1)", ["8xMI300X"]),
        ("gpu:nvidia_rtx_6000_ada_generation:2", ["2xRTX-6000-Ada"]),
    ],
)  # fmt: skip
def test_slurm_gres(gres: str, cards: list[str], tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(f"NodeName=x1 Arch=x86_64 Gres={gres} State=IDLE+CLOUD Partitions=p\n")
    (node,) = nodes_from_slurm(path, {}).nodes
    assert [f"{c.count}x{c.gpu}" for c in node.cards] == cards


@pytest.mark.parametrize(
    ("gres", "held", "free"),
    [
        ("gpu:t4:8", "cpu=1,gres/gpu=3", ["5xT4"]),
        ("gpu:t4:8", "cpu=1,gres/gpu=3,gres/gpu:t4=3", ["5xT4"]),
        ("gpu:t4:8", "", ["8xT4"]),
        ("gpu:l4:2,gpu:t4:2", "gres/gpu=3,gres/gpu:l4=1,gres/gpu:t4=2", ["1xL4"]),
        ("gpu:l4:2,gpu:l40s:2", "gres/gpu=2,gres/gpu:l40s=2", ["2xL4"]),
        ("gpu:h200:8", "gres/gpu=9,gres/gpu:h200=6,gres/gpu:h200_1g.18gb=3", ["2xH200"]),
    ],
)  # fmt: skip
def test_slurm_gpus_that_no_job_holds(
    gres: str, held: str, free: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(
        f"NodeName=x1 Gres={gres} State=MIXED CfgTRES=cpu=9,gres/gpu=9 AllocTRES={held}\n"
    )
    (node,) = nodes_from_slurm(path, {}, is_only_free=True).nodes
    assert [f"{c.count}x{c.gpu}" for c in node.cards] == free


UNCOUNTED = "Gres=gpu:a100:8 State=MIXED CfgTRES=cpu=128,mem=1031000M AllocTRES=cpu=48,mem=300G"


@pytest.mark.parametrize(
    ("node", "free"),
    [
        (f"GresUsed=gpu:a100:2(IDX:0-1) {UNCOUNTED}", ["6xA100-80GB"]),
        (f"GresUsed=gpu:a100:3(IDX:0,2-3) {UNCOUNTED}", ["5xA100-80GB"]),
        (f"GresUsed=gpu:a100:0(IDX:N/A) {UNCOUNTED}", ["8xA100-80GB"]),
        (f"GresUsed=gpu:(null):2(IDX:0-1) {UNCOUNTED}", ["6xA100-80GB"]),
        (f"GresUsed=gpu:2,shard:a100:3(1/8,2/8) {UNCOUNTED}", ["6xA100-80GB"]),
        ("Gres=gpu:l4:2,gpu:t4:2 GresUsed=gpu:l4:1(IDX:0),gpu:t4:2(IDX:2-3) State=MIXED",
         ["1xL4"]),
        ("Gres=gpu:a100:8 State=IDLE CfgTRES=cpu=128 AllocTRES=", ["8xA100-80GB"]),
        ("Gres=gpu:a100:8 State=MIXED CfgTRES=cpu=1,gres/gpu=8 AllocTRES=cpu=1", ["8xA100-80GB"]),
    ],
)  # fmt: skip
def test_slurm_gpus_in_use_without_tres(node: str, free: list[str], tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(f"NodeName=gpu02 {node}\n")
    (found,) = nodes_from_slurm(path, {"a100": "A100-80GB"}, is_only_free=True).nodes
    assert [f"{c.count}x{c.gpu}" for c in found.cards] == free


@pytest.mark.parametrize(
    "used", ["", "GresUsed=(null) ", "GresUsed=gpu:a100:1,gpu:x ", "GresUsed=gpu "]
)
def test_slurm_gpus_that_nobody_counts_are_not_free(used: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(f"NodeName=gpu02 {used}{UNCOUNTED}\n")
    with pytest.raises(
        ClusterError, match=r"gpu02 is left out: how many .* `scontrol show nodes -d`"
    ):
        nodes_from_slurm(path, {"a100": "A100-80GB"}, is_only_free=True)
    taken = nodes_from_slurm(path, {"a100": "A100-80GB"})
    assert [node.count for node in taken.nodes] == [8]
    assert any("gpu02 is taken with all its GPUs: how many" in note for note in taken.notes)


def kubernetes(folder: Path, labels: dict[str, str], **node: Any) -> Path:
    path = folder / "nodes.json"
    status = {"allocatable": node.pop("offers"), **node.pop("status", {})}
    item = {"kind": "Node", "metadata": {"name": "k1", "labels": labels}, "status": status, **node}
    path.write_text(json.dumps({"kind": "List", "items": [item]}, indent=1))
    return path


NVIDIA, AMD = "nvidia.com/gpu.product", "amd.com/gpu.product-name"


@pytest.mark.parametrize(
    ("labels", "offers", "cards"),
    [
        ({NVIDIA: "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"},
         {"nvidia.com/gpu": "8"}, "8xH100-80GB"),
        ({NVIDIA: "NVIDIA-A100-SXM4-40GB-SHARED", "nvidia.com/gpu.count": "4"},
         {"nvidia.com/gpu": "40"}, "4xA100-40GB"),
        ({NVIDIA: "NVIDIA-GeForce-RTX-4090", "nvidia.com/gpu.count": "2"},
         {"nvidia.com/gpu": 2}, "2xRTX-4090"),
        ({NVIDIA: "Tesla-V100-SXM2-32GB"}, {"nvidia.com/gpu": "4"}, "4xV100-32GB"),
        ({NVIDIA: "NVIDIA-RTX-6000-Ada-Generation"}, {"nvidia.com/gpu": "1"}, "1xRTX-6000-Ada"),
        ({AMD: "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"},
         {"amd.com/gpu": "8"}, "8xMI300X"),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, {"nvidia.com/gpu": "2"}, "2xL4"),
    ],
)  # fmt: skip
def test_kubernetes_labels(
    labels: dict[str, str], offers: dict[str, Any], cards: str, tmp_path: Path
) -> None:
    (node,) = nodes_from_kubernetes(kubernetes(tmp_path, labels, offers=offers), {}).nodes
    assert f"{node.count}x{node.cards[0].gpu}" == cards


@pytest.mark.parametrize(
    ("labels", "node", "words"),
    [
        ({NVIDIA: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, {}, "its GPUs are cut into parts"),
        ({NVIDIA: "NVIDIA-L4"}, {"spec": {"unschedulable": True}}, "it is cordoned"),
        ({NVIDIA: "NVIDIA-L4"},
         {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, "it is not ready"),
        ({NVIDIA: "NVIDIA-L4"}, {"offers": {"nvidia.com/gpu": "0"}}, "offers none of it"),
        ({}, {}, r"nodes\.json:\d+: node k1 offers nvidia.com/gpu, but no label says which"),
        ({NVIDIA: "NVIDIA-L4"}, {"offers": {"nvidia.com/gpu": "two"}}, "not a number of GPUs"),
    ],
)  # fmt: skip
def test_kubernetes_nodes_that_are_left_out_or_refused(
    labels: dict[str, str], node: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = kubernetes(tmp_path, labels, **{"offers": {"nvidia.com/gpu": "2"}, **node})
    with pytest.raises(ClusterError, match=words):
        nodes_from_kubernetes(path, {})


@pytest.mark.parametrize(
    ("text", "machine", "site"),
    [
        ("resources: {infra: aws/us-east-1/us-east-1a, accelerators: A100-80GB:8}",
         "8xA100-80GB", "aws-us-east-1-us-east-1a"),
        ("resources: {cloud: lambda, region: us-west-1, accelerators: {H100: 4}}",
         "4xH100-80GB", "lambda-us-west-1"),
        ("resources: {ordered: [{accelerators: 'L40S:4', cloud: gcp}, {accelerators: 'L4:8'}]}",
         "4xL40S", "gcp"),
        ("resources: {accelerators: 'L4', any_of: [{infra: k8s/ctx}, {infra: aws}]}",
         "1xL4", "k8s-ctx"),
        ("resources: {any_of: [{infra: gcp, accelerators: ['T4:4', 'L4:4']}]}", "4xT4", "gcp"),
        ("num_nodes: null\nresources: {accelerators: 'RTX5090:2', infra: ssh/pool}\nservice: {}\n",
         "2xRTX-5090", "ssh-pool"),
        ("resources: {accelerators: {V100-32GB: 8, V100: 8}, use_spot: true, infra: '*/eu'}",
         "8xV100-32GB", "eu"),
    ],
)  # fmt: skip
def test_skypilot_forms(text: str, machine: str, site: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("resources: {accelerators: T4:1, infra: other}")
    found = nodes_from_skypilot([tmp_path / "a.yaml", tmp_path / "b.yaml"], {})
    node = found.nodes[0]
    assert (f"{node.count}x{node.cards[0].gpu}", node.site) == (machine, site)
