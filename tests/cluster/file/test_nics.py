"""Several NICs of a machine in cluster.yaml: near which GPU, what links become, what is refused."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.cluster.nics import Nics
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError

FILE = """version: 1
nodes:
  - {{name: a, gpu: A100-40GB, count: 4{a}}}
  - {{name: b, gpu: A100-40GB, count: 4{b}}}
  - {{name: far, gpu: A100-40GB, count: 2, site: far{far}}}
links:
  inside_node: {{A100-40GB: {{bandwidth: 200 GB/s, latency: 5 us}}}}
  between_nodes: {{bandwidth: {link}, latency: 20 us}}
  between_sites: [{{sites: [main, far], bandwidth: 1 GB/s, latency: 1 ms}}]
"""
FOUR = ", nics: {count: 4, bandwidth: 10 GB/s}"
TWO = ", nics: {count: 2, bandwidth: 10 GB/s}"


def read(tmp_path: Path, a: str = "", b: str = "", far: str = "", link: str = "10 GB/s") -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.format(a=a, b=b, far=far, link=link))
    return load_cluster(path)


A0, A1, B0 = Device("a", 0), Device("a", 1), Device("b", 0)


@pytest.mark.parametrize(
    ("a", "b", "link", "all_of_them", "one_pair"),
    [
        (FOUR, FOUR, "10 GB/s", 40e9, 10e9),
        (FOUR, TWO, "10 GB/s", 20e9, 10e9),
        (FOUR, FOUR, "8 GB/s", 32e9, 8e9),  # the network carries less than a NIC
        (FOUR, FOUR, "80 GB/s", 40e9, 10e9),
        (FOUR, "", "40 GB/s", 40e9, 10e9),  # b has one for all
        (FOUR, "", "10 GB/s", 10e9, 10e9),
        (FOUR, ", nics: {count: 1, bandwidth: 40 GB/s}", "40 GB/s", 40e9, 10e9),
        (FOUR + ", uplink: 25 GB/s", FOUR, "10 GB/s", 25e9, 10e9),
    ],
)
def test_a_pair_has_one_nic_and_two_machines_have_all(
    a: str, b: str, link: str, all_of_them: float, one_pair: float, tmp_path: Path
) -> None:
    cluster = read(tmp_path, a, b, link=link)
    assert cluster.path(A0, B0).bytes_per_s == pytest.approx(all_of_them)
    assert cluster.path(B0, A0).bytes_per_s == pytest.approx(all_of_them)
    assert cluster.link(A0, B0).bytes_per_s == pytest.approx(one_pair)
    assert cluster.link(A0, A1) == cluster.path(A0, A1)


def test_the_capacity_of_a_machine_is_the_sum(tmp_path: Path) -> None:
    cluster = read(tmp_path, FOUR, FOUR + ", uplink: 25 GB/s")
    assert [node.uplink_bytes_per_s for node in cluster.nodes] == [40e9, 25e9, inf]


def test_a_link_between_sites_stays_one_path(tmp_path: Path) -> None:
    cluster = read(tmp_path, FOUR, FOUR, ", nics: {count: 2, bandwidth: 10 GB/s}")
    there = Device("far", 1)
    assert cluster.path(A0, there).bytes_per_s == cluster.link(A0, there).bytes_per_s == 1e9


def test_gpus_are_divided_in_order_or_as_the_file_says(tmp_path: Path) -> None:
    given = ", nics: {count: 2, bandwidth: 10 GB/s, gpus: [[0, 2], [1, 3]]}"
    cluster = read(tmp_path, TWO, given)
    assert [node.nics for node in cluster.nodes] == [
        Nics(10e9, (0, 0, 1, 1)),
        Nics(10e9, (0, 1, 0, 1)),
        None,
    ]
    assert cluster.nic_of(Device("a", 3)) == "NIC 1 of a"
    assert cluster.nic_of(Device("far", 1)) == "far"


def test_a_file_without_nics_keeps_its_hash_and_nics_change_it(tmp_path: Path) -> None:
    plain = read(tmp_path)
    assert cluster_hash(plain) == "b994387cde79a1f7a8415d63049f02e8c7818647190436295ad62ed4861924c0"
    assert not plain.has_nics and plain.without_nics is plain
    hashes = {cluster_hash(read(tmp_path, a)) for a in ("", TWO, FOUR)}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("nics", "said"),
    [
        ("{count: 0, bandwidth: 10 GB/s}", "count"),
        ("{count: 2}", "bandwidth"),
        ("{count: 2, bandwidth: 10}", "bandwidth"),
        ("{count: 5, bandwidth: 10 GB/s}", "5 NICs for 4 GPUs"),
        ("{count: 2, bandwidth: 10 GB/s, gpus: [[0, 1]]}", "1 lists for 2 NICs"),
        ("{count: 2, bandwidth: 10 GB/s, gpus: [[0, 1], [2, 4]]}", "machine a has no GPU 4"),
        ("{count: 2, bandwidth: 10 GB/s, gpus: [[0, 1], [1, 2, 3]]}", "GPU 1 stands in two"),
        ("{count: 2, bandwidth: 10 GB/s, gpus: [[0, 1], [2]]}", "GPU 3 is near no NIC"),
        ("{count: 2, bandwidth: 10 GB/s, gpus: [[0, 1, 2, 3], []]}", "no GPU is near NIC 1"),
        ("{count: 2, bandwidth: 10 GB/s, gpus: [[-1, 1], [2, 3]]}", "gpus"),
    ],
)
def test_nics_that_cannot_be_are_refused_with_their_place(
    nics: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError) as refused:
        read(tmp_path, f", nics: {nics}")
    message = str(refused.value)
    assert said in message and "cluster.yaml:3" in message and "nics" in message


@pytest.mark.parametrize(
    ("a", "b", "link", "measured", "said"),
    [
        (FOUR, FOUR, "10 GB/s", "", None),
        (FOUR, FOUR, "8 GB/s", "", None),
        (FOUR, FOUR, "10.1 GB/s", "", "8: links.between_nodes.bandwidth: 10.1 GB/s is more than"),
        (FOUR, FOUR, "400 Gb/s", "", "any two machines carry, 10 GB/s, which counts"),
        # Half of the machines are too slow: no pair is as fast as the link all the same.
        (FOUR, ", nics: {count: 4, bandwidth: 50 GB/s}", "50 GB/s", "", "50 GB/s is more"),
        # A single NIC for all of a machine may carry what all NICs of the other do.
        (FOUR, "", "40 GB/s", "", None),
        (FOUR, "", "41 GB/s", "", "carry, 40 GB/s"),
        ("", "", "400 GB/s", "", None),
        # Pairs that were measured, but for those between sites.
        (FOUR, FOUR, "10 GB/s", "[a, b], bandwidth: 11 GB/s", "10: links.measured[0].bandwidth"),
        (FOUR, FOUR, "10 GB/s", "[a, far], bandwidth: 11 GB/s", None),
    ],
)
def test_a_link_that_no_two_machines_have_nics_for_is_said_with_its_place(
    a: str, b: str, link: str, measured: str, said: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    more = f"  measured: [{{nodes: {measured}, latency: 9 us}}]\n" if measured else ""
    path.write_text(FILE.format(a=a, b=b, far=FOUR.replace("4", "2"), link=link) + more)
    doubts = [str(doubt) for doubt in load_cluster(path).doubts]
    assert len(doubts) == (said is not None)
    if said is not None:
        assert said in doubts[0] and str(path) in doubts[0]


def test_a_link_as_fast_as_the_fastest_machines_of_some_site_is_the_networks(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cluster.yaml"
    fast = "  - {{name: c, gpu: A100-40GB, count: 2, nics: {{count: 2, bandwidth: 20 GB/s}}{}}}\n"
    for site, num_doubts in ((", site: far", 0), ("", 1)):
        nodes = fast.format(site) + "  - {name: far,"
        far = ", nics: {count: 2, bandwidth: 20 GB/s}"
        text = FILE.format(a=FOUR, b=FOUR, far=far, link="20 GB/s")
        path.write_text(text.replace("  - {name: far,", nodes))
        assert len(load_cluster(path).doubts) == num_doubts
