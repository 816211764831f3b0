"""`discover` on what `nvidia-smi` prints on six machines with unlike cards, and `init` on names.

The recordings are written by hand after the formats that `nvidia-smi --help-query-gpu` and
`nvidia-smi topo -m` document.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.discovery import draft_node, parse_gpus
from megatron_hetero.cluster.inventory.measurements import LinkFit
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.cluster.inventory.topology import parse_topology
from megatron_hetero.cluster.spec import Cluster

# index, name, memory.total, compute_cap, pci.bus_id, display_active, memory.used,
# pcie.link.gen.max, pcie.link.width.current
WORKSTATION = """\
0, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:01:00.0, Enabled, 1391, 4, 16, Disabled
1, NVIDIA GeForce RTX 3090, 24576, 8.6, 00000000:21:00.0, Disabled, 1, 4, 16, Disabled
2, NVIDIA GeForce RTX 3090, 24576, 8.6, 00000000:22:00.0, Disabled, 1, 4, 16, Disabled
"""
WORKSTATION_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tPHB\t0-31\t0\t\tN/A
GPU1\tPHB\t X \tNV4\t0-31\t0\t\tN/A
GPU2\tPHB\tNV4\t X \t0-31\t0\t\tN/A

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
# NVIDIA/Megatron-LM#1757, machines A and B.  In A the cards alternate on the bus.
ALTERNATING = """\
0, NVIDIA GeForce RTX 3080, 10240, 8.6, 00000000:01:00.0, Disabled, 1, 4, 8, Disabled
1, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:02:00.0, Disabled, 1, 4, 8, Disabled
2, NVIDIA GeForce RTX 3080, 10240, 8.6, 00000000:03:00.0, Disabled, 1, 4, 8, Disabled
3, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:04:00.0, Disabled, 1, 4, 4, Disabled
"""
ALTERNATING_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tPHB\tPHB\tPHB\t0-15
GPU1\tPHB\t X \tPHB\tPHB\t0-15
GPU2\tPHB\tPHB\t X \tPHB\t0-15
GPU3\tPHB\tPHB\tPHB\t X \t0-15
"""
TWO_SOCKETS = """\
0, NVIDIA GeForce RTX 2080 Ti, 11264, 7.5, 00000000:18:00.0, Disabled, 1, 3, 16, Disabled
1, NVIDIA GeForce RTX 2080 Ti, 11264, 7.5, 00000000:3B:00.0, Disabled, 1, 3, 16, Disabled
2, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:86:00.0, Disabled, 1, 3, 16, Disabled
3, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:AF:00.0, Disabled, 1, 3, 16, Disabled
"""
TWO_SOCKETS_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNODE\tSYS\tSYS\tNODE\t0-15,32-47\t0
GPU1\tNODE\t X \tSYS\tSYS\tNODE\t0-15,32-47\t0
GPU2\tSYS\tSYS\t X \tNODE\tSYS\t16-31,48-63\t1
GPU3\tSYS\tSYS\tNODE\t X \tSYS\t16-31,48-63\t1
NIC0\tNODE\tNODE\tSYS\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
"""
# huggingface/pytorch-image-models#580; the driver does not number them as the bus does.
BRIDGED = """\
0, NVIDIA RTX A6000, 49140, 8.6, 00000000:5E:00.0, Disabled, 3, 3, 16, Disabled
1, NVIDIA GeForce RTX 2080 Ti, 11264, 7.5, 00000000:17:00.0, Disabled, 1, 3, 16, Disabled
2, NVIDIA RTX A6000, 49140, 8.6, 00000000:5F:00.0, Disabled, 3, 3, 16, Disabled
3, NVIDIA GeForce RTX 2080 Ti, 11264, 7.5, 00000000:18:00.0, Disabled, 1, 3, 16, Disabled
"""
BRIDGED_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tPHB\tNV4\tPHB
GPU1\tPHB\t X \tPHB\tNV2
GPU2\tNV4\tPHB\t X \tPHB
GPU3\tPHB\tNV2\tPHB\t X
"""
# Lightning-AI/pytorch-lightning#16914.
FOUR_TYPES = """\
0, NVIDIA GeForce RTX 2080 Ti, 11264, 7.5, 00000000:01:00.0, Disabled, 1, 3, 16, Disabled
1, NVIDIA GeForce RTX 3090, 24576, 8.6, 00000000:02:00.0, Disabled, 1, 3, 16, Disabled
2, NVIDIA A10, 23028, 8.6, 00000000:81:00.0, Disabled, 1, 3, 16, Disabled
3, NVIDIA A40, 46068, 8.6, 00000000:82:00.0, Disabled, 1, 3, 16, Disabled
"""
FOUR_TYPES_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tPXB\tSYS\tSYS
GPU1\tPXB\t X \tSYS\tSYS
GPU2\tSYS\tSYS\t X \tPXB
GPU3\tSYS\tSYS\tPXB\t X
"""
SERVER = """\
0, NVIDIA A100-PCIE-40GB, 40960, 8.0, 00000000:01:00.0, Disabled, 0, 4, 16, Disabled
1, NVIDIA A100-PCIE-40GB, 40960, 8.0, 00000000:25:00.0, Disabled, 0, 4, 16, Disabled
2, NVIDIA A100 80GB PCIe, 81920, 8.0, 00000000:81:00.0, Disabled, 0, 4, 16, Disabled
3, NVIDIA A100 80GB PCIe, 81920, 8.0, 00000000:A1:00.0, Disabled, 0, 4, 16, Disabled
4, NVIDIA L40S, 46068, 8.9, 00000000:C1:00.0, Disabled, 0, 4, 16, Disabled
"""
SERVER_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4
GPU0\t X \tNV12\tSYS\tSYS\tSYS
GPU1\tNV12\t X \tSYS\tSYS\tSYS
GPU2\tSYS\tSYS\t X \tNV12\tNODE
GPU3\tSYS\tSYS\tNV12\t X \tNODE
GPU4\tSYS\tSYS\tNODE\tNODE\t X
"""
GB = 1e9


def written(
    gpus: str, topology: str, tmp_path: Path, measured: LinkFit | None = None
) -> tuple[str, Cluster]:
    """The text of the file, and what it loads as."""
    node = draft_node(parse_gpus(gpus), parse_topology(topology, "a test"), measured, host="box")
    text = cluster_yaml([node], "from a test")
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return text, load_cluster(path)


def types(cluster: Cluster) -> list[str]:
    assert list(cluster.machines) == ["box"]
    return [cluster.gpu_type(device).name for device in cluster.devices]


def speeds(cluster: Cluster) -> dict[tuple[int, int], float]:
    """Bytes per second of each two cards, by their places on the bus."""
    return {
        (a.index, b.index): cluster.link(a, b).bytes_per_s
        for a in cluster.devices
        for b in cluster.devices
        if a.index < b.index
    }


def test_a_workstation_with_a_bridge_and_a_screen(tmp_path: Path) -> None:
    text, cluster = written(WORKSTATION, WORKSTATION_TOPOLOGY, tmp_path)
    assert types(cluster) == ["RTX-4090", "RTX-3090", "RTX-3090"]
    assert speeds(cluster) == {(0, 1): 12 * GB, (0, 2): 12 * GB, (1, 2): 40 * GB}
    # 1391 MiB are used by the screen now.
    assert "{type: RTX-4090, count: 1, reserve: 1536 MiB}  # drives a screen" in text
    assert [sorted(n.indices) for n in cluster.nodes] == [[0], [1, 2]]


def test_cards_that_alternate_and_a_slot_of_four_lanes(tmp_path: Path) -> None:
    text, cluster = written(ALTERNATING, ALTERNATING_TOPOLOGY, tmp_path)
    assert types(cluster) == ["RTX-3080", "RTX-4090", "RTX-3080", "RTX-4090"]
    found = speeds(cluster)
    slow = {pair for pair, speed in found.items() if speed == pytest.approx(6.3 * GB)}
    assert slow == {(0, 3), (1, 3), (2, 3)}
    assert {speed for pair, speed in found.items() if pair not in slow} == {12 * GB}
    assert "cards: [0, 3], bandwidth: 6.3 GB/s" in text


def test_two_sockets(tmp_path: Path) -> None:
    text, cluster = written(TWO_SOCKETS, TWO_SOCKETS_TOPOLOGY, tmp_path)
    assert types(cluster) == ["RTX-2080-Ti"] * 2 + ["RTX-4090"] * 2
    assert {p for p, speed in speeds(cluster).items() if speed == 12 * GB} == {(0, 1), (2, 3)}
    assert set(speeds(cluster).values()) == {12 * GB, 8 * GB}
    assert "pairs:" not in text
    # A log of nccl-tests over all cards says what joins them, and no guess is left.
    fit = LinkFit(2e-5, 7.25e9, 0.01)
    text, cluster = written(TWO_SOCKETS, TWO_SOCKETS_TOPOLOGY, tmp_path, fit)
    assert set(speeds(cluster).values()) == {7.25 * GB} and "guess" not in text


def test_bridges_and_a_driver_that_numbers_otherwise_than_the_bus(tmp_path: Path) -> None:
    _, cluster = written(BRIDGED, BRIDGED_TOPOLOGY, tmp_path)
    assert types(cluster) == ["RTX-2080-Ti"] * 2 + ["RTX-A6000"] * 2
    found = speeds(cluster)
    assert (found.pop((0, 1)), found.pop((2, 3))) == (20 * GB, 40 * GB)
    assert set(found.values()) == {12 * GB}


def test_four_types(tmp_path: Path) -> None:
    _, cluster = written(FOUR_TYPES, FOUR_TYPES_TOPOLOGY, tmp_path)
    assert types(cluster) == ["RTX-2080-Ti", "RTX-3090", "A10", "A40"]
    assert set(speeds(cluster).values()) == {8 * GB}  # unlike cards: the slowest path of them
    assert len(cluster.nodes) == 4


def test_a_server_with_bridged_pairs(tmp_path: Path) -> None:
    _, cluster = written(SERVER, SERVER_TOPOLOGY, tmp_path)
    assert types(cluster) == ["A100-40GB-PCIe"] * 2 + ["A100-80GB-PCIe"] * 2 + ["L40S"]
    fast = {pair for pair, speed in speeds(cluster).items() if speed > 100 * GB}
    assert fast == {(0, 1), (2, 3)}


def test_bridges_between_equal_cards_are_pairs_and_a_web_is_not(tmp_path: Path) -> None:
    cards = "".join(
        f"{i}, NVIDIA RTX A6000, 49140, 8.6, 00000000:0{i}:00.0, Disabled, 1, 4, 16, Disabled\n"
        for i in range(4)
    )
    two = (
        "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\tX\tNV4\tSYS\tSYS\nGPU1\tNV4\tX\tSYS\tSYS\n"
        "GPU2\tSYS\tSYS\tX\tNV4\nGPU3\tSYS\tSYS\tNV4\tX\n"
    )
    text, cluster = written(cards, two, tmp_path)
    assert [n.indices for n in cluster.nodes] == [(0, 1), (2, 3)]
    assert "gpu: RTX-A6000" in text and "gpus:" not in text
    web = two.replace("GPU1\tNV4\tX\tSYS", "GPU1\tNV4\tX\tNV4").replace(
        "SYS\tSYS\tX", "SYS\tNV4\tX"
    )
    text, cluster = written(cards, web, tmp_path)
    (node,) = cluster.nodes
    assert (node.num_gpus, node.link.bytes_per_s) == (4, 8 * GB)


def test_a_card_that_nobody_knows_says_what_to_fill_in_and_then_loads(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    """An RTX 3090 beside a Pascal card, which has no bf16 to ask for."""
    answer = (
        "0, NVIDIA GeForce RTX 3090, 24576, 8.6, 00000000:01:00.0, Disabled, 1, 4, 16, Disabled\n"
        "1, NVIDIA GeForce GTX 1080 Ti, 11264, 6.1, 00000000:02:00.0, Disabled, 1, 3, 8, Disabled\n"
    )
    program = tmp_path / "nvidia-smi"
    matrix = "\tGPU0\tGPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n"
    program.write_text(
        f"#!/bin/sh\ncase $1 in topo) printf '%s' '{matrix}';; *) printf '%s' '{answer}';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "cluster.yaml"
    assert main(["discover", "-o", str(path)]) == 0
    assert "question marks first: the catalogue has no GTX-1080-Ti" in words_of(capsys)
    text = path.read_text()
    assert 'bf16: "?' not in text  # the example has one
    path.write_text(text.replace("? GB/s", "484 GB/s").replace("? TFLOPS", "11 TFLOPS"))
    assert [n.gpu_type.name for n in load_cluster(path).nodes] == ["RTX-3090", "GTX-1080-Ti"]
    # Where all is known, the next command is named.
    answer_of_known = answer.replace("GTX 1080 Ti", "RTX 3060").replace("11264", "12288")
    program.write_text(program.read_text().replace(answer, answer_of_known))
    monkeypatch.chdir(tmp_path)
    assert main(["discover", "-o", "known.yaml"]) == 0
    assert "megatron-hetero plan --cluster known.yaml" in words_of(capsys)


def words_of(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_names_and_schedulers_say_unlike_cards_too(tmp_path: Path, capsys) -> None:
    path = tmp_path / "cluster.yaml"
    words = ["--node", "box=1xRTX-4090+2xRTX-3090@lab", "--node", "b=2xA100-80GB@lab"]
    assert main(["init", *words, "-o", str(path)]) == 0
    cluster = load_cluster(path)
    assert {name: len(islands) for name, islands in cluster.machines.items()} == {"box": 2, "b": 1}
    assert {n.site for n in cluster.nodes} == {"lab"}
    for wrong in ("box=1xRTX-4090+RTX-3090", "box=1xRTX-4090+", "box=0xRTX-4090+1xRTX-3090"):
        other = tmp_path / "other.yaml"
        assert main(["init", "--node", wrong, "-o", str(other)]) != 0, wrong
        assert not other.exists()
    said = capsys.readouterr().err
    assert "box=1xRTX-4090+2xRTX-3090" in said
