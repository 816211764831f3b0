"""Machines with unlike cards: which cards are one node, and what joins the others."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError

WORKSTATION = """
version: 1
nodes:
  - name: box
    gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]
    link: {bandwidth: 12 GB/s, latency: 12 us}
    pairs: [{cards: [1, 2], bandwidth: 50 GB/s, latency: 6 us}]
"""


def load(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_a_workstation_is_an_island_of_each_type(tmp_path: Path) -> None:
    cluster = load(tmp_path, WORKSTATION)
    assert [node.name for node in cluster.nodes] == ["box/RTX-4090", "box/RTX-3090"]
    assert {node.machine for node in cluster.nodes} == {node.host for node in cluster.nodes}
    assert [node.indices for node in cluster.nodes] == [(0,), (1, 2)]
    assert cluster.nodes[1].link == Link(50e9, 6e-6)
    assert cluster.node_links["box/RTX-4090", "box/RTX-3090"] == Link(12e9, 12e-6)
    assert [device.name for device in cluster.devices] == ["box:0", "box:1", "box:2"]
    assert cluster.node_of("box:2").gpu_type.name == "RTX-3090"


def test_types_in_turns_keep_the_places_of_the_bus(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        WORKSTATION.replace(
            "[{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]",
            "[{type: RTX-3090, count: 1}, {type: RTX-4090, count: 1}, {type: RTX-3090, count: 1}]",
        ).replace("[1, 2]", "[0, 2]"),
    )
    assert {node.gpu_type.name: node.indices for node in cluster.nodes} == {
        "RTX-3090": (0, 2),
        "RTX-4090": (1,),
    }
    assert [cluster.gpu_type(device).name for device in cluster.devices] == [
        "RTX-3090",
        "RTX-4090",
        "RTX-3090",
    ]


def test_bridges_divide_equal_cards(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        """
version: 1
nodes:
  - name: box
    gpu: RTX-A6000
    count: 4
    link: {bandwidth: 12 GB/s, latency: 12 us}
    pairs:
      - {cards: [0, 1], bandwidth: 50 GB/s, latency: 6 us}
      - {cards: [3, 2], bandwidth: 50 GB/s, latency: 6 us}
""",
    )
    assert [(node.name, node.indices) for node in cluster.nodes] == [
        ("box/RTX-A6000-1", (0, 1)),
        ("box/RTX-A6000-2", (2, 3)),
    ]
    assert {node.link.bytes_per_s for node in cluster.nodes} == {50e9}


def test_one_type_in_two_entries_is_the_short_form(tmp_path: Path) -> None:
    short = load(
        tmp_path,
        "version: 1\nnodes: [{name: a, gpu: L4, count: 3, link: {bandwidth: 9 GB/s, "
        "latency: 9 us}}]\n",
    )
    long = load(
        tmp_path,
        "version: 1\nnodes: [{name: a, gpus: [{type: L4, count: 1}, {type: L4, count: 2}], "
        "link: {bandwidth: 9 GB/s, latency: 9 us}}]\n",
    )
    assert short.nodes == long.nodes
    assert cluster_hash(short) == cluster_hash(long)


def test_a_screen_takes_memory_of_its_card_alone(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        """
version: 1
nodes:
  - name: desk
    gpus: [{type: RTX-3090, count: 1, reserve: 2 GiB}, {type: RTX-3090, count: 1}]
    link: {bandwidth: 12 GB/s, latency: 12 us}
""",
    )
    with_screen, without = cluster.nodes
    assert without.gpu_type.memory_bytes - with_screen.gpu_type.memory_bytes == 2 << 30


def test_links_by_pairs_of_types(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        """
version: 1
nodes:
  - name: box
    gpus: [{type: A6000, count: 2}, {type: RTX-2080-Ti, count: 2}]
links:
  inside_node:
    A6000: {bandwidth: 50 GB/s, latency: 6 us}
    RTX-2080-Ti: {bandwidth: 6 GB/s, latency: 12 us}
  between_types:
    - {types: [RTX-A6000, RTX-2080-Ti], bandwidth: 5 GB/s, latency: 15 us}
""",
    )
    assert cluster.node_links["box/RTX-2080-Ti", "box/RTX-A6000"] == Link(5e9, 15e-6)


def test_a_machine_that_a_limit_names_is_all_its_islands(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        WORKSTATION + "limits: {first_stage: [box], idle: ['box:1'], "
        "no_tensor_parallel_across: [nodes, box]}\n",
    )
    assert cluster.limits.first_stage_nodes == ("box/RTX-4090", "box/RTX-3090")
    assert set(cluster.limits.no_tensor_parallel_across) == {
        "nodes",
        "box/RTX-4090",
        "box/RTX-3090",
    }


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("count: 1", "count: 0", "nodes[0].gpus[0].count"),
        ("cards: [1, 2]", "cards: [1]", "pairs[0].cards: needs 2 or more entries; it has 1"),
        ("cards: [1, 2]", "cards: [1, -2]", "nodes[0].pairs[0].cards[1]"),
        ("cards: [1, 2]", "cards: [1, 3]", "machine box has no card 3; it has 3 (0-2)"),
        ("cards: [1, 2]", "cards: [1, 1]", "a card stands here twice"),
        ("cards: [1, 2]", "cards: [0, 1]", "nodes[0].pairs[0].cards: cards 0 and 1: 50 GB/s is "
         "more than PCIe 4.0 carries in one direction (31.5 GB/s), and no bridge joins RTX-4090 "
         "and RTX-3090"),
        ("RTX-3090, count", "RTX-3080, count", "RTX-3080 has no connector for an NVLink bridge"),
        ("name: box", "name: box\n    gpu: L4", 'both "gpus" and "gpu"/"count" are given'),
        ("    link: {bandwidth: 12 GB/s, latency: 12 us}\n", "",
         "has no link between its cards 0 (RTX-4090) and 1 (RTX-3090); add an entry of "
         "links.between_types"),
        ("count: 1}", "count: 1, reserve: 24 GiB}", "is all that a RTX-4090 has"),
        ("RTX-4090, count", "RTX-4091, count", "did you mean"),
    ],
)  # fmt: skip
def test_faults_are_named_with_their_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    message = refused(tmp_path, WORKSTATION.replace(old, new, 1))
    assert words in message
    assert len(message.splitlines()) == 1, "one fault, one line"
    assert f"{tmp_path / 'cluster.yaml'}:" in message


@pytest.mark.parametrize(
    ("gpus", "bandwidth"),
    [
        ("{type: RTX-3090, count: 2}", "56 GB/s"),  # a bridge
        ("{type: RTX-4090, count: 1}, {type: RTX-3090, count: 1}", "31 GB/s"),  # the slots
        ("{type: A100-80GB, count: 2}", "300 GB/s"),  # as they are built
        ("{type: mine, count: 2}", "200 GB/s"),  # nobody knows
    ],
)
def test_links_that_cards_can_have_load(tmp_path: Path, gpus: str, bandwidth: str) -> None:
    text = f"""
version: 1
gpu_types: {{mine: {{memory: 24 GB, memory_bandwidth: 900 GB/s, bf16: 100 TFLOPS, library: NCCL}}}}
nodes:
  - name: box
    gpus: [{gpus}]
    link: {{bandwidth: 12 GB/s, latency: 12 us}}
    pairs: [{{cards: [0, 1], bandwidth: {bandwidth}, latency: 6 us}}]
"""
    one, other = load(tmp_path, text).devices
    assert load(tmp_path, text).link(one, other).bytes_per_s == float(bandwidth.split()[0]) * 1e9


@given(data=st.data())
def test_islands_are_the_coarsest_classes_of_cards_that_are_alike(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, 6))
    types = data.draw(st.lists(st.sampled_from(["L4", "A40"]), min_size=count, max_size=count))
    fast = data.draw(st.sets(st.sampled_from(list(combinations(range(count), 2)))))
    entries = ", ".join(f"{{type: {name}, count: 1}}" for name in types)
    pairs = ", ".join(
        f"{{cards: [{a}, {b}], bandwidth: 30 GB/s, latency: 6 us}}" for a, b in sorted(fast)
    )
    cluster = load(
        tmp_path_factory.mktemp("islands"),
        f"version: 1\nnodes: [{{name: a, gpus: [{entries}], pairs: [{pairs}], "
        "link: {bandwidth: 9 GB/s, latency: 9 us}}]\n",
    )

    def speed(one: int, other: int) -> float:
        return 30e9 if (min(one, other), max(one, other)) in fast else 9e9

    def are_alike(one: int, other: int) -> bool:
        rest = set(range(count)) - {one, other}
        return types[one] == types[other] and all(speed(one, i) == speed(other, i) for i in rest)

    assert sorted(i for node in cluster.nodes for i in node.indices) == list(range(count))
    of = {i: node for node in cluster.nodes for i in node.indices}
    for a, b in combinations(range(count), 2):
        assert (of[a] is of[b]) == are_alike(a, b)
    for a, b in product(range(count), repeat=2):
        if a != b:
            one, other = cluster.device_by_name[f"a:{a}"], cluster.device_by_name[f"a:{b}"]
            assert cluster.link(one, other).bytes_per_s == speed(a, b)
            assert cluster.gpu_type(one).name == types[a]


@pytest.mark.parametrize(
    ("cards", "is_counted"),
    [
        ("gpu: L4, count: 4", False),
        ("gpus: [{type: L4, count: 2}, {type: L4, count: 2}]", False),
        ("gpus: [{type: L4, count: 2}, {type: A40, count: 2}]", True),
        (
            "gpu: A40, count: 4, pairs: [{cards: [0, 1], bandwidth: 50 GB/s, latency: 6 us}]",
            True,
        ),
    ],
)
def test_a_root_complex_that_nothing_counts_is_said_with_its_place(
    cards: str, is_counted: bool, tmp_path: Path
) -> None:
    cluster = load(
        tmp_path,
        f"version: 1\nnodes:\n- {{name: a, {cards}, root_complex: 1 GB/s,\n"
        "   link: {bandwidth: 9 GB/s, latency: 9 us}}\n",
    )
    assert len(cluster.doubts) == (not is_counted)
    if not is_counted:
        assert "cluster.yaml:3: nodes[0].root_complex: it counts between unlike" in str(
            cluster.doubts[0]
        )
