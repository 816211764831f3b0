"""Programs of layers as a terminal and as JSON show them."""

from __future__ import annotations

from rich.console import Console

from megatron_hetero.cost.model import CostModel
from megatron_hetero.planner.advise.programs import StagePrograms
from megatron_hetero.planner.synthesis.costed import LayerGroup, layer_prices
from megatron_hetero.planner.synthesis.forms import SHARDED, TENSOR, RuntimeForm
from megatron_hetero.planner.synthesis.prices import program_bytes
from megatron_hetero.planner.synthesis.synthesise import LayerOption, synthesise
from megatron_hetero.report.text.programs import (
    collective_words,
    option_words,
    program_lines,
    programs_data,
)
from tests.cost.builders import CLUSTER, make_workload


def option(form: RuntimeForm, *, is_executed: bool = True) -> LayerOption:
    costs = CostModel(CLUSTER, make_workload())
    place = LayerGroup(CLUSTER.devices[:2], 4, 1, 16, (1e12, 1e12))
    prices = layer_prices(costs, place, form.along)
    made = synthesise(prices, form.allows)
    assert made is not None
    taken = program_bytes(made.program, prices, made.shares)
    if is_executed:
        return LayerOption(form, made, 0.002, (), taken)
    return LayerOption(None, made, None, ("all-to-all of Q",), taken)


def stage(*options: LayerOption) -> StagePrograms:
    return StagePrograms(1, 0, ("a:0", "a:1"), "tp2:4", 0.0021, options)


def shown(*options: LayerOption) -> str:
    console = Console(width=90)
    with console.capture() as captured:
        for line in program_lines([stage(*options)]):
            console.print(line)
    return captured.get()


def test_options_are_named_as_layouts_have_them() -> None:
    assert option_words(option(TENSOR)) == "tp2"
    assert option_words(option(SHARDED)) == "replicas 1:1, sharded"
    assert option_words(option(TENSOR, is_executed=False)) == "any program"


def test_collectives_of_both_passes_are_named() -> None:
    assert collective_words(option(TENSOR).synthesis.program) == (
        "forward all-reduce F G; backward all-reduce dM dN"
    )
    assert collective_words(option(SHARDED).synthesis.program) == (
        "forward all-gather QKV PROJ UP DOWN; "
        "backward all-gather DOWN UP PROJ QKV, reduce-scatter dQKV dPROJ dUP dDOWN"
    )


def test_the_table_shows_what_is_not_executed() -> None:
    text = shown(option(TENSOR), option(TENSOR, is_executed=False))
    assert "replica 1, stage 0" in text
    assert "tp2:4, 2.1 ms" in text
    assert "not executed: all-to-all of Q" in text
    assert "no other way to divide a layer fits" in shown()


def test_json_has_every_instruction() -> None:
    data = programs_data(stage(option(TENSOR)))
    (own,) = data["options"]  # type: ignore[misc]
    assert own["form"] == "tensor parallel"
    assert "all-reduce F (partial -> whole)" in own["program"]
    assert own["shares"]["columns"] == [0.5, 0.5]
