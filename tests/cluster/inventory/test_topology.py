"""`nvidia-smi topo -m`: what joins GPUs and NICs."""

from __future__ import annotations

import pytest

from megatron_hetero.cluster.inventory.topology import parse_topology
from megatron_hetero.errors import FileFormatError

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def test_a_topology_is_read() -> None:
    found = parse_topology(TOPOLOGY, "topo")
    joins = found.joins
    assert joins[0, 1] == joins[1, 0] == "NV12"
    assert joins[1, 2] == "PHB"
    assert len(joins) == 6
    assert found.nics == {(0, "NIC0"): "PXB", (1, "NIC0"): "SYS", (2, "NIC0"): "SYS"}


def test_nics_have_their_devices_names() -> None:
    legend = TOPOLOGY + "NIC Legend:\n\n  NIC0: mlx5_3\n"
    assert {device for _, device in parse_topology(legend, "topo").nics} == {"mlx5_3"}
    older = TOPOLOGY.replace("NIC0", "mlx5_0")
    assert {device for _, device in parse_topology(older, "topo").nics} == {"mlx5_0"}


@pytest.mark.parametrize("text", ["", "GPU1 X", TOPOLOGY.replace("GPU2\tSYS\tPHB\t X ", "GPU2")])
def test_no_topology_is_refused(text: str) -> None:
    with pytest.raises(FileFormatError):
        parse_topology(text, "topo")
