"""NICs of a first cluster file: which are near which GPU, and how fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.discovery import draft_node, parse_gpus
from megatron_hetero.cluster.inventory.nics import parse_ports, port_files
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.cluster.inventory.topology import Topology, parse_topology
from megatron_hetero.cluster.nics import Nics

# A machine as NVIDIA's DGX A100: two GPUs and two NICs on each PCIe switch, and two NICs for
# storage that are as far from one GPU as from another.
GPUS = "".join(
    f"{i}, NVIDIA A100-SXM4-80GB, 81920, 8.0, 00000000:{n:02X}:00.0, Disabled, 4, 4, 16, Disabled\n"
    for i, n in enumerate((7, 15, 71, 78, 135, 144, 183, 189))
)
NICS = 10


def path(gpu: int, nic: int) -> str:
    """Of four switches, two on each socket; the last two NICs are on none of them."""
    if nic >= 8:
        return "SYS"
    if gpu // 2 == nic // 2:
        return "PXB"
    return "NODE" if gpu // 4 == nic // 4 else "SYS"


def matrix() -> str:
    names = [*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(NICS))]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for i in range(8):
        words = [" X " if i == j else "NV12" for j in range(8)]
        lines.append(
            "\t".join([f"GPU{i}", *words, *(path(i, n) for n in range(NICS)), "0-31", "0"])
        )
    legend = "\n".join(f"  NIC{n}: mlx5_{n}" for n in range(NICS))
    return "\n".join(lines) + f"\n\nNIC Legend:\n\n{legend}\n"


def ports(rates: dict[int, int], down: tuple[int, ...] = ()) -> str:
    lines = []
    for nic, rate in rates.items():
        at = f"/sys/class/infiniband/mlx5_{nic}/ports/1"
        lines.append(f"{at}/rate:{rate} Gb/sec (4X HDR)")
        lines.append(f"{at}/state:{'1: DOWN' if nic in down else '4: ACTIVE'}")
    return "\n".join(lines)


def nics_of(said: str, tmp_path: Path) -> tuple[Nics | None, str]:
    node = draft_node(parse_gpus(GPUS), parse_topology(matrix(), "a test"), host="dgx", ports=said)
    text = cluster_yaml([node], "x")
    output = tmp_path / "cluster.yaml"
    output.write_text(text)
    (found,) = load_cluster(output).nodes
    return found.nics, text


def test_each_gpu_takes_a_near_nic_of_its_own(tmp_path: Path) -> None:
    nics, text = nics_of(ports(dict.fromkeys(range(8), 200)), tmp_path)
    assert nics == Nics(25e9, tuple(range(8)))
    assert "nics: {count: 8, bandwidth: 200 Gb/s}}\n" in text  # divided in order: nothing to say


def test_what_is_not_connected_does_not_count(tmp_path: Path) -> None:
    # One NIC of each switch is left; the slowest speaks for all.
    rates = dict.fromkeys(range(NICS), 200) | {4: 100}
    nics, text = nics_of(ports(rates, down=(1, 2, 5, 7)), tmp_path)
    assert nics == Nics(12.5e9, (0, 0, 1, 1, 2, 2, 3, 3))
    assert "gpus" not in text.partition("nics")[2].partition("\n")[0]


def test_an_order_of_its_own_is_written(tmp_path: Path) -> None:
    # The first switch has both of its NICs, the others one each.
    nics, text = nics_of(ports(dict.fromkeys(range(8), 200), down=(3, 5, 7)), tmp_path)
    assert nics == Nics(25e9, (0, 1, 2, 2, 3, 3, 4, 4))
    assert "gpus: [[0], [1], [2, 3], [4, 5], [6, 7]]" in text


def test_an_unknown_rate_is_a_guess(tmp_path: Path) -> None:
    nics, text = nics_of("grep: no such file", tmp_path)
    assert nics is not None and nics.num == 8
    assert "nics: {count: 8, bandwidth: 100 Gb/s}}  # a guess: measure it" in text


def test_one_nic_is_the_machines_path(tmp_path: Path) -> None:
    nics, text = nics_of(ports(dict.fromkeys(range(NICS), 200), tuple(range(1, NICS))), tmp_path)
    assert nics is None and "nics" not in text


def test_the_network_is_guessed_from_the_nics() -> None:
    found = parse_topology(matrix(), "a test")
    nodes = [
        draft_node(parse_gpus(GPUS), found, host=name, ports=ports(dict.fromkeys(range(8), rate)))
        for name, rate in (("a", 400), ("b", 200))
    ]
    line = next(s for s in cluster_yaml(nodes, "x").splitlines() if "between_nodes" in s)
    assert "bandwidth: 200 Gb/s, latency: 10 us}  # a guess" in line
    bare = draft_node(parse_gpus(GPUS), Topology(found.joins), host="c")
    assert "between_nodes: {bandwidth: 10 Gb/s" in cluster_yaml([*nodes, bare], "x")


def test_only_these_files_are_asked_for() -> None:
    files = port_files(parse_topology(matrix(), "a test"))
    assert len(files) == 2 * NICS
    assert files[0] == "/sys/class/infiniband/mlx5_0/ports/1/rate"


@pytest.mark.parametrize("line", ["", "x", "/sys/class/infiniband/../ports/1/rate:1 Gb/sec"])
def test_other_lines_do_not_count(line: str) -> None:
    assert parse_ports(line) == {}
