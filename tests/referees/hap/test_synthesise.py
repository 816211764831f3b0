"""Programs and shares together: what the alternation promises, and what it says of groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.plan.layout import parse_layout
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.referees.hap.numeric import Exchange, edges_of, given, largest_error
from tools.referees.hap.costed import LayerGroup, layer_prices
from tools.referees.hap.forms import (
    CONTEXT,
    TENSOR,
    exchanged_factors,
    form_of,
    lacks,
)
from tools.referees.hap.layer import SIDE_BY_SIDE, TOGETHER, part_graph
from tools.referees.hap.prices import (
    ProgramPrices,
    program_bytes,
    program_s,
)
from tools.referees.hap.search import ProgramSearch
from tools.referees.hap.synthesise import (
    layer_options,
    starting_shares,
    synthesise,
)

CLUSTER = make_cluster(("a", FAST, 1), ("b", SLOW, 1), between=Link(25e9, 5e-6))
SHAPE = {
    "num_layers": 8, "hidden_size": 2048, "seq_length": 2048, "max_position_embeddings": 2048,
    "num_attention_heads": 16, "num_query_groups": 16, "kv_channels": 128,
}  # fmt: skip


def place_on(cluster: Cluster, room: float = 1e12, num_micro_batches: int = 16) -> LayerGroup:
    devices = cluster.devices
    return LayerGroup(devices, 8, 1, num_micro_batches, (room,) * len(devices))


def mlp_prices(tokens: float, num_micro_batches: int) -> ProgramPrices:
    """An MLP of 1,024 units and 4,096 columns in 2-byte elements on two like GPUs, 1 GB/s apart."""
    graph = part_graph("mlp")
    hidden, columns = 1024.0, 4096.0
    of = {"nth": tokens * hidden, "ntc": tokens * columns, "hc": hidden * columns}
    of["ch"] = of["hc"]
    flops = 2 * tokens * hidden * columns / 1e14
    lines = {}
    for step in graph.steps:
        for rule in step.rules if step.computes else ():
            work = (0.0, flops) if rule.division != "whole" else (flops, 0.0)
            lines[step.name, rule.division] = (work, work)
    return ProgramPrices(
        graph,
        lines,
        {tensor: 2 * of[letters] for tensor, letters in graph.letters.items()},
        Link(1e9, 0.0),
        (0.5 / 1e9, 0.0),
        num_micro_batches,
        room_bytes=(inf, inf),
    )


@pytest.mark.parametrize(
    ("tokens", "num_micro_batches", "exchanges"),
    [
        # 512 (1,024 + 4,096) < 1,024 x 4,096: factors are fewer than the gradient is.
        (512, 1, True),
        # The gradient is summed once for 16 micro-batches, factors are sent for each.
        (512, 16, False),
        (2048, 1, False),
    ],
)
def test_factors_are_exchanged_where_they_are_fewer(
    tokens: int, num_micro_batches: int, exchanges: bool
) -> None:
    prices = mlp_prices(tokens, num_micro_batches)
    shares = next(iter(starting_shares(prices)))

    def divides_tokens(step: object, rule: object) -> bool:
        name, division = step.name, rule.division  # type: ignore[attr-defined]
        if not step.computes:  # type: ignore[attr-defined]
            return division == ("whole" if "weight" in name else "tokens")
        return division == "tokens" or name in ("gradient of UP", "gradient of DOWN")

    found = ProgramSearch(prices, shares, divides_tokens).best()
    assert found is not None
    assert (exchanged_factors(prices, found.program) == ("DOWN", "UP")) == exchanges
    edges = edges_of({"tokens": (5, 3), "columns": (3, 3)})
    assert largest_error(prices.graph, found.program, given(3), Exchange(edges, 2)) < 1e-12
    assert (form_of(prices, found.program) is None) == exchanges
    if exchanges:
        assert "exchange of factors for DOWN, UP" in lacks(prices, found.program)


def test_options_are_executed_as_they_say() -> None:
    """Each form gives a stage that a layout takes, and programs that give one device's numbers."""
    workload = make_workload(**SHAPE, use_distributed_optimizer=True)
    costs = CostModel(CLUSTER, workload)
    options = layer_options(costs, place_on(CLUSTER))
    forms = [option.form for option in options if option.form is not None]
    assert {form.name for form in forms} == {
        "tensor parallel",
        "context parallel",
        "replicas",
        "replicas with sharded layers",
    }
    prices = {
        along: layer_prices(costs, place_on(CLUSTER), along) for along in (TOGETHER, SIDE_BY_SIDE)
    }
    units = {"sequences": (2, 1), "tokens": (5, 3), "columns": (4, 2), "elements": (1, 2)}
    for option in options:
        of = prices[TOGETHER if option.form is None else option.form.along]
        program = option.synthesis.program
        assert largest_error(of.graph, program, given(5), Exchange(edges_of(units), 2)) < 1e-12
        if option.form is None:
            assert option.lacking
            continue
        assert form_of(of, program) in (option.form, replace(option.form, fixed=("tokens",)))
        stage = option.form.stage(option.synthesis.shares)
        assert (stage is None) == ("sequences" in option.form.along)
        if stage is not None:
            assert str(parse_layout(f"{stage}:8 @16")) == f"{stage}:8 @16"
            assert option.priced_s == pytest.approx(option.synthesis.seconds, rel=0.05)


def test_where_memory_is_short_weights_are_divided() -> None:
    """Eight layers take 4.8 GB of each GPU where weights are whole, 7.2 GB of both where not."""
    costs = CostModel(CLUSTER, make_workload(**SHAPE, use_distributed_optimizer=True))
    for room, fits in ((30e9, True), (4.5e9, False)):
        prices = layer_prices(costs, place_on(CLUSTER, room), TOGETHER)
        whole = synthesise(prices, CONTEXT.allows)
        divided = synthesise(prices, TENSOR.allows)
        assert (whole is not None) == fits
        assert divided is not None
        taken = program_bytes(divided.program, prices, divided.shares)
        assert max(taken) <= room * (1 + 1e-6)


def test_shares_and_program_are_each_best_for_the_other() -> None:
    """Of an MLP no grid of shares has a faster program than the alternation finds."""
    prices = replace(
        mlp_prices(2048, 4),
        compute_s={
            key: (own[0], tuple(2.5 * part for part in own[1]))  # type: ignore[misc]
            for key, own in mlp_prices(2048, 4).compute_s.items()
        },
        link=Link(50e9, 1e-6),
    )
    found = synthesise(prices)
    assert found is not None
    assert found.seconds == pytest.approx(program_s(found.program, prices, found.shares))
    best = inf
    for tokens, columns in product((0.5, 0.68, 0.71, 0.75), repeat=2):
        shares = {
            **found.shares,
            "tokens": (tokens, 1 - tokens),
            "columns": (columns, 1 - columns),
        }
        best = min(best, ProgramSearch(prices, shares).best().seconds)  # type: ignore[union-attr]
    assert found.seconds <= best * (1 + 1e-6)
