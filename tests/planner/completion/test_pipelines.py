"""Messages between the stages of one pipeline, in seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.planner.completion.pipelines import PipelineCompleter
from megatron_hetero.planner.problem import make_problem
from tests.planner.completion.boxes import WORKLOAD, boxes, chain


def test_trips_by_hand() -> None:
    """An activation of 1024 tokens, 512 wide, in bf16 is 1 MiB: at 1 GB/s about 1.05 ms."""
    problem = make_problem(boxes(), WORKLOAD)
    completer = PipelineCompleter(problem)
    structure = (chain("a0", "a1", "b0"),)
    tables = completer.table(structure, 1, False)
    assert completer.pipeline(tables, structure[0], 8) is not None
    trips_s, busiest_s = completer.trips(tables, structure[0])
    one_s = (1024 * 512 * 2) / 1e9
    inside_s = (1024 * 512 * 2) / 100e9
    assert trips_s == pytest.approx([2 * (inside_s + 3e-6), 2 * (one_s + 10e-3)])
    assert busiest_s == pytest.approx(one_s)


def test_the_slower_direction_of_a_link_is_the_busiest() -> None:
    """Forth at 1 GB/s, back at a quarter of that."""
    cluster = boxes()
    slow_back = {
        pair: replace(link, bytes_per_s=2.5e8) if pair == ("b", "a") else link
        for pair, link in cluster.node_links.items()
    }
    completer = PipelineCompleter(make_problem(replace(cluster, node_links=slow_back), WORKLOAD))
    structure = (chain("a0", "b0"),)
    trips_s, busiest_s = completer.trips(completer.table(structure, 1, False), structure[0])
    one_s = (1024 * 512 * 2) / 1e9
    assert busiest_s == pytest.approx(4 * one_s)
    assert trips_s == pytest.approx([5 * one_s + 20e-3])


def test_larger_micro_batches_take_longer_trips() -> None:
    completer = PipelineCompleter(make_problem(boxes(), WORKLOAD))
    structure = (chain("a0", "b0"),)
    small, large = (completer.table(structure, size, False) for size in (1, 4))
    one, four = (completer.trips(tables, structure[0])[1] for tables in (small, large))
    assert four == pytest.approx(4 * one)
