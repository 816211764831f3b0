"""Rules that follow from letters give what einsum gives; collectives lead where they say."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tools.referees.hap.states import (
    DIMENSIONS,
    Graph,
    State,
    is_of_weight,
    operator,
)

ALONG = ("sequences", "tokens", "columns")
SIZES = {"n": 5, "t": 4, "s": 4, "c": 6, "h": 3}
EDGES = {"n": (0, 1, 5), "t": (0, 3, 4), "c": (0, 2, 6)}
"""Where the parts of two GPUs begin, and the end."""
tensors = st.lists(st.sampled_from("ntchs"), min_size=1, max_size=3, unique=True).map("".join)


def part(whole: np.ndarray, letters: str, state: State, gpu: int) -> np.ndarray:
    """What a GPU has of a tensor that is whole or divided."""
    at = [x if DIMENSIONS.get(x) == state else None for x in letters]
    return whole[tuple(slice(None) if x is None else slice(*EDGES[x][gpu : gpu + 2]) for x in at)]


@settings(max_examples=60)
@given(a=tensors, b=tensors, data=st.data())
def test_every_rule_of_an_operator_gives_its_result(a: str, b: str, data: st.DataObject) -> None:
    letters = sorted(set(a + b))
    out = "".join(data.draw(st.permutations(letters)))[: data.draw(st.integers(1, len(letters)))]
    assume(set(out) & set("ntc"))
    rng = np.random.default_rng(0)
    whole = {n: rng.normal(size=[SIZES[x] for x in of]) for n, of in (("A", a), ("B", b))}
    expected = np.einsum(f"{a},{b}->{out}", whole["A"], whole["B"])
    step = operator("work", {"A": a, "B": b}, {"C": out}, ALONG)
    assert {rule.division for rule in step.rules} == {"whole"} | {
        DIMENSIONS[x] for x in letters if x in DIMENSIONS
    }
    for rule in step.rules:
        needs = dict(rule.needs)
        ((_, state),) = rule.makes
        made = []
        for gpu in range(2):
            own = [part(whole[n], of, needs[n], gpu) for n, of in (("A", a), ("B", b))]
            made.append(np.einsum(f"{a},{b}->{out}", *own))
        if state == "partial":
            made = [made[0] + made[1]] * 2
        for gpu, own in enumerate(made):
            there = expected if state == "partial" else part(expected, out, state, gpu)
            np.testing.assert_allclose(own, there, rtol=1e-12, atol=1e-12)


STATES: tuple[State, ...] = ("whole", "partial", "sequences", "tokens", "columns", "elements")
GRAPH = Graph((), {"X": "nth", "U": "ntc", "W": "hc", "dW": "hc"}, frozenset({"dW"}), ALONG)


def reached(tensor: str, state: State) -> set[State]:
    """The states that one collective leads to."""
    return {to for _, to in GRAPH.conversions((tensor, state))}


def test_what_collectives_lead_to_by_hand() -> None:
    assert reached("U", "partial") == {"whole", "sequences", "tokens", "columns"}
    assert reached("X", "tokens") == {"whole", "sequences"}
    assert reached("W", "whole") == {"columns", "elements"}
    # A weight's elements lie in any order: no all-to-all leads to columns.
    assert reached("W", "elements") == {"whole"}
    # A whole weight gradient is the sum of the training step, and stays so.
    assert reached("dW", "whole") == set()
    assert reached("dW", "partial") == {"whole", "columns", "elements"}
    assert [is_of_weight(of) for of in ("hc", "ch", "nth", "nsc")] == [True, True, False, False]


@pytest.mark.parametrize("tensor", GRAPH.letters)
def test_ways_are_all_chains_of_one_collective_or_else_of_two(tensor: str) -> None:
    """Against all chains, from random sets of what is there."""
    rng = Random(tensor)
    for _ in range(60):
        there = [(tensor, s) for s in STATES if rng.random() < 0.3] + [("other", "whole")]
        need = rng.choice([s for s in STATES if (tensor, s) not in there] or ["whole"])
        if (tensor, need) in there:
            continue
        found = GRAPH.ways((tensor, need), there)
        starts = [s for name, s in there if name == tensor]
        single = {(s, need) for s in starts if need in reached(tensor, s)}
        double = {
            (s, over, need)
            for s in starts
            for over in reached(tensor, s) - set(starts)
            if need in reached(tensor, over)
        }
        chains = [(way[0].before, *[one.state for one in way]) for way in found]
        assert len(chains) == len(set(chains)) and set(chains) == (single or double)
        for way in found:
            for first, then in pairwise(way):
                assert first.state == then.before
