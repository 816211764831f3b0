"""First cluster files: from what a driver says, and from names; all of them load."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.discovery import (
    catalogue_name,
    check_whole,
    draft_node,
    find_gpus,
    parse_gpus,
)
from megatron_hetero.cluster.inventory.measurements import LinkFit
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.cluster.inventory.topology import Topology
from megatron_hetero.errors import ClusterError, EnvironmentMismatchError

SLOT = "Disabled, 4, 4, 16, Disabled"
FOUR = "".join(
    f"{i}, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:0{i}:00.0, {SLOT}\n" for i in range(4)
)
PATHS = {(i, j): "PHB" if i + j == 1 else "SYS" for i in range(4) for j in range(4) if i != j}


def loaded(text: str, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize(
    ("name", "mib", "wanted"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("Tesla V100-SXM2-16GB", 16384, "V100-16GB"),
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000"),
        ("NVIDIA GeForce GTX 1080", 8192, None),
        ("NVIDIA GeForce RTX 4090", 48000, None),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL"),
        ("NVIDIA H800", 81559, "H800-80GB"),
        ("NVIDIA H20", 97871, "H20-96GB"),
        ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA H200 NVL", 143771, "H200-NVL"),
        ("NVIDIA B200", 183359, "B200"),
        ("NVIDIA B300 SXM6 AC", 275040, "B300"),
        ("NVIDIA GB200", 189471, "GB200"),
        ("Tesla P100-PCIE-16GB", 16280, "P100-PCIe-16GB"),
        ("Tesla P100-SXM2-16GB", 16280, "P100-16GB"),
        ("NVIDIA GeForce RTX 3060", 12288, "RTX-3060"),
        ("NVIDIA GeForce RTX 3080", 10240, "RTX-3080"),
        ("NVIDIA GeForce RTX 3080", 12288, "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "RTX-4060-Ti-8GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX-4060-Ti-16GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "RTX-4070-Ti-Super"),
        ("NVIDIA GeForce RTX 4090 D", 24564, "RTX-4090-D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
        ("NVIDIA GeForce RTX 5070 Ti", 16303, "RTX-5070-Ti"),
        ("NVIDIA GeForce RTX 5090", 32607, "RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTX-PRO-6000-Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "RTX-PRO-6000-Max-Q"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada"),
    ],
)
def test_drivers_names_are_those_of_the_catalogue(name: str, mib: int, wanted: str | None) -> None:
    assert catalogue_name(name, mib << 20) == wanted


def test_a_machine_becomes_a_file_that_loads(tmp_path: Path) -> None:
    nodes = [draft_node(parse_gpus(FOUR), Topology(PATHS), host="box")]
    text = cluster_yaml(nodes, "from a test")
    cluster = loaded(text, tmp_path)
    (node,) = cluster.nodes
    assert (node.name, node.num_gpus, node.gpu_type.name) == ("box", 4, "RTX-4090")
    # The slowest path between two of them stands for all.
    assert node.link.bytes_per_s == 8e9
    assert "a guess" in text


def test_a_measured_link_is_no_guess(tmp_path: Path) -> None:
    nodes = [draft_node(parse_gpus(FOUR), Topology(PATHS), LinkFit(7e-6, 19.5e9, 0.02), host="box")]
    text = cluster_yaml(nodes, "from a test")
    assert "guess" not in text
    (node,) = loaded(text, tmp_path).nodes
    assert (node.link.bytes_per_s, node.link.latency_s) == (19.5e9, pytest.approx(7e-6))


def test_one_gpu_needs_no_link(tmp_path: Path) -> None:
    nodes = [draft_node(parse_gpus(FOUR.splitlines()[0]), None, host="_my_box")]
    assert nodes[0].name == "my-box"
    assert loaded(cluster_yaml(nodes, "x"), tmp_path).devices


def test_a_gpu_that_the_catalogue_lacks_must_be_described(tmp_path: Path) -> None:
    gpus = parse_gpus(f"0, NVIDIA GeForce GTX 1080, 8192, 6.1, 00000000:01:00.0, {SLOT}")
    text = cluster_yaml([draft_node(gpus, None, host="box")], "x")
    assert "GTX-1080: {memory: 8192 MiB" in text
    with pytest.raises(ClusterError, match="memory_bandwidth"):  # the question mark stops it
        loaded(text, tmp_path)


@pytest.mark.parametrize("text", ["", "No devices were found", "0, a, b, c"])
def test_other_answers_of_the_driver_are_refused(text: str) -> None:
    with pytest.raises(EnvironmentMismatchError, match="nvidia-smi"):
        parse_gpus(text)


def test_without_a_driver_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentMismatchError, match="init --node"):
        find_gpus()


def test_every_gpu_of_the_catalogue_can_be_started_from(tmp_path: Path) -> None:
    from megatron_hetero.cli.main import main

    path = tmp_path / "cluster.yaml"
    nodes = [f"--node=n{i}={1 + i % 8}x{name}" for i, name in enumerate(gpu_type_names())]
    assert main(["init", *nodes, "-o", str(path)]) == 0
    types = [node.gpu_type for node in load_cluster(path).nodes]
    assert types == [gpu_type(name) for name in gpu_type_names()]
    assert main(["init", *nodes, "-o", str(path)]) == 2  # never overwritten
    other = tmp_path / "other.yaml"
    assert main(["init", "--node", "a=RTX-4090", "-o", str(other)]) == 2
    assert main(["init", "--node", "a=2xRTX-9999", "-o", str(other)]) == 4
    assert not other.exists()


def test_a_card_without_memory_is_named() -> None:
    lost = ", ".join(["[GPU is lost]"] * 2)
    rest = ", ".join(["[GPU is lost]"] * 5)
    line = f"4, NVIDIA A100-SXM4-80GB, {lost}, 00000000:0F:00.0, {rest}\n"
    with pytest.raises(EnvironmentMismatchError, match=r"GPU '4', .*'\[GPU is lost\]': mend"):
        parse_gpus(FOUR + line)
    with pytest.raises(EnvironmentMismatchError, match="lists no GPU"):
        parse_gpus("No devices were found\n")


def test_a_topology_of_another_machine_is_refused() -> None:
    """Its missing rows would be paths between sockets, in silence."""
    of_two = Topology({(0, 1): "PHB", (1, 0): "PHB"}, {(0, "mlx5_0"): "PXB", (1, "mlx5_0"): "PXB"})
    with pytest.raises(EnvironmentMismatchError, match="topology has 2 GPUs and the machine 4"):
        draft_node(parse_gpus(FOUR), of_two, host="box")
    one = parse_gpus(FOUR.splitlines()[0])
    with pytest.raises(EnvironmentMismatchError, match="topology has 2 GPUs and the machine 1"):
        draft_node(one, of_two, host="box")
    assert draft_node(one, Topology({}), host="box").count == 1


def test_cards_that_mig_divides_are_refused() -> None:
    check_whole(parse_gpus(FOUR))
    divided = FOUR.replace("16, Disabled\n2", "16, Enabled\n2")
    with pytest.raises(EnvironmentMismatchError, match=r"MIG divides GPU 1, .* -i 1 -mig 0"):
        check_whole(parse_gpus(divided))
