"""Every program gives what one device gives: outputs, gradients of inputs and of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.referees.hap.numeric import (
    Exchange,
    edges_of,
    given,
    largest_error,
    on_one_device,
)
from tests.referees.hap.random_programs import random_program
from tools.referees.hap.layer import (
    SIDE_BY_SIDE,
    TOGETHER,
    layer_graph,
    part_graph,
)
from tools.referees.hap.states import Dimension, Graph, operator

UNITS = {
    2: {"sequences": (2, 1), "tokens": (3, 5), "columns": (4, 2), "elements": (1, 2)},
    3: {"sequences": (1, 1, 1), "tokens": (5, 2, 1), "columns": (3, 2, 1), "elements": (4, 2, 1)},
}
ROUNDING = 1e-12
"""Sums of at most some hundred products of fp64 numbers about 1."""


def graph_of(part: str, along: tuple[Dimension, ...]) -> Graph:
    return layer_graph(along) if part == "layer" else part_graph(part, along)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_gpus", [2, 3])
@pytest.mark.parametrize("along", [TOGETHER, SIDE_BY_SIDE], ids=["together", "side by side"])
@pytest.mark.parametrize("part", ["attention", "mlp", "layer"])
def test_a_random_program_gives_what_one_device_gives(
    part: str, along: tuple[Dimension, ...], num_gpus: int
) -> None:
    graph, edges = graph_of(part, along), edges_of(UNITS[num_gpus])
    kinds = set()
    for seed in range(20):
        program = random_program(graph, Random(seed))
        assert largest_error(graph, program, given(seed), Exchange(edges, num_gpus)) < ROUNDING
        kinds |= {one.kind for one in program}
    assert kinds >= {"compute", "all-reduce", "reduce-scatter", "all-gather", "slice"}
    assert ("all-to-all" in kinds) == (along is TOGETHER)


def test_the_operators_are_the_gradients_of_each_other() -> None:
    """Against differences: the executed operators are a layer and its backward pass."""
    graph, inputs = layer_graph(), given(7)
    made = on_one_device(graph, inputs)

    def loss(changed: Mapping[str, np.ndarray]) -> float:
        there = on_one_device(graph, changed)
        return float(((there["Y"] + there["G"]) * inputs["dG"]).sum())

    rng = np.random.default_rng(0)
    for name in ("X", "QKV", "PROJ", "UP", "DOWN"):
        direction = rng.normal(size=inputs[name].shape)
        step = 1e-6
        there = loss({**inputs, name: inputs[name] + step * direction})
        back = loss({**inputs, name: inputs[name] - step * direction})
        slope = float((made[f"d{name}"] * direction).sum())
        assert (there - back) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_a_wrong_rule_is_noticed() -> None:
    """Attention to the keys of a GPU's own tokens alone is not what one device does."""
    graph, edges = part_graph("attention", ("tokens",)), edges_of(UNITS[2])
    wrong = tuple(
        operator(step.name, {"Q": "ntc", "KV": "ntc"}, {"O": "ntc"}, ("tokens",))
        if step.name == "core attention"
        else step
        for step in graph.steps
    )
    program = random_program(
        replace(graph, steps=wrong),
        Random(1),
        lambda step, rule: not step.computes or rule.division == "tokens",
    )
    assert largest_error(replace(graph, steps=wrong), program, given(1), Exchange(edges, 2)) > 0.01
