"""Lines that paths share: their loads, and what they let through at most."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.lines import LineTable, line_seconds, most_bytes_per_s
from tests.cost.builders import FAST, make_cluster

PAIRS = list(permutations("abcd", 2))


def cluster(uplink: float | None = None, between_sites: float | None = None) -> Cluster:
    """Nodes a and b here, c and d there; each two have 1 GB/s for themselves."""
    made = make_cluster(
        *[(name, FAST, 2) for name in "abcd"],
        between=Link(1e9, 1e-3),
        sites=["here", "here", "there", "there"],
    )
    if uplink is not None:
        nodes = tuple(replace(node, uplink_bytes_per_s=uplink) for node in made.nodes)
        made = replace(made, nodes=nodes)
    lines = {}
    if between_sites is not None:
        for pair in (("here", "there"), ("there", "here")):
            lines[pair] = (Line(f"line {pair[0]} {pair[1]}", between_sites),)
    return replace(made, site_lines=lines)


def test_without_lines_nothing_is_shared() -> None:
    alone = cluster()
    assert LineTable(alone).numbers == {}
    numbers, seconds = LineTable(alone).loads(np.array([0]), np.array([1]), np.array([1e9]))
    assert len(numbers) == len(seconds) == 0
    assert line_seconds(alone, [(("a", "b"), 1e9)]) == {}
    assert most_bytes_per_s(alone, PAIRS) == 12e9


def test_uplinks_by_hand() -> None:
    """What a sends to b and to c leaves by one uplink of 2 GB/s, and arrives by two."""
    found = line_seconds(cluster(2e9), [(("a", "b"), 1e9), (("a", "c"), 3e9)])
    assert found == {
        "uplink of a out": pytest.approx(2.0),
        "uplink of b in": pytest.approx(0.5),
        "uplink of c in": pytest.approx(1.5),
    }


def test_a_line_between_sites_carries_one_direction() -> None:
    found = line_seconds(
        cluster(between_sites=5e8), [(("a", "c"), 1e9), (("b", "d"), 1e9), (("c", "a"), 1e9)]
    )
    assert found == {"line here there": pytest.approx(4.0), "line there here": pytest.approx(2.0)}


messages = st.lists(st.tuples(st.sampled_from(PAIRS), st.floats(1.0, 1e9)), min_size=1, max_size=12)


@settings(max_examples=30)
@given(messages, st.sampled_from([None, 2e9]), st.sampled_from([None, 5e8]))
def test_the_table_loads_what_the_lines_of_each_path_say(
    sent: list[tuple[tuple[str, str], float]], uplink: float | None, between: float | None
) -> None:
    made = cluster(uplink, between)
    table = LineTable(made)
    senders, receivers = (np.array(["abcd".index(pair[i]) for pair, _ in sent]) for i in (0, 1))
    numbers, seconds = table.loads(senders, receivers, np.array([size for _, size in sent]))
    names = {number: name for name, number in table.numbers.items()}
    found = {names[n]: s for n, s in zip(numbers.tolist(), seconds.tolist(), strict=True)}
    assert found == pytest.approx(line_seconds(made, sent))
    for name, number in table.numbers.items():
        assert table.bytes_per_s[number] == (uplink if name.startswith("uplink") else between)


def test_paths_together_carry_no_more_than_their_lines() -> None:
    """Four paths from here to there, 1 GB/s each, on a line of 0.5; and four back."""
    across = [pair for pair in PAIRS if (pair[0] in "ab") != (pair[1] in "ab")]
    assert most_bytes_per_s(cluster(), across) == 8e9
    assert most_bytes_per_s(cluster(between_sites=5e8), across) == 1e9
    assert most_bytes_per_s(cluster(2.5e9), [("a", "b"), ("a", "c"), ("a", "d")]) == 2.5e9
    assert most_bytes_per_s(cluster(2.5e9), [("a", "b")]) == 1e9


@settings(max_examples=30)
@given(st.lists(st.sampled_from(PAIRS), min_size=1, unique=True), st.sampled_from([1.5e9, 4e9]))
def test_more_paths_carry_no_less_and_narrower_lines_no_more(
    pairs: list[tuple[str, str]], uplink: float
) -> None:
    made = cluster(uplink, 5e8)
    whole = most_bytes_per_s(made, pairs)
    assert most_bytes_per_s(made, pairs[:-1]) <= whole + 1e-3
    assert whole <= most_bytes_per_s(cluster(uplink), pairs) + 1e-3
    assert whole <= most_bytes_per_s(cluster(), pairs) == len(pairs) * 1e9
