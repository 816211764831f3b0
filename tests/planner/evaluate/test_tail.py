"""The estimate of the gradient exchange: near its exact price where rings are all there is, and
more where paths share a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.evaluate.tail import Tails
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, Unit
from tests.cost.builders import FAST, make_cluster, make_workload, without_lines
from tests.planner.evaluate.boxes import problem_of


def test_a_line_between_sites_is_counted_in_the_estimate_of_the_exchange() -> None:
    """Two replicas on two sites of two nodes each: both halves of the gradients cross one line."""
    estimates_s = []
    for shared in (False, True):
        problem = problem_of(1)
        if shared:
            lines = {("w", "e"): (Line("there", 1e8),), ("e", "w"): (Line("back", 1e8),)}
            nodes = tuple(
                replace(n, site="w" if n.name in "ac" else "e") for n in problem.cluster.nodes
            )
            cluster = replace(problem.cluster, nodes=nodes, site_lines=lines)
            problem = make_problem(cluster, problem.workload)
        completer = Completer(problem)
        chains = tuple(tuple(Unit(node, (0,)) for node in of) for of in ("ac", "bd"))
        found = completer.complete(chains, completer.own_size)
        assert found is not None
        estimates_s.append(Tails(problem).estimate_s(found))
    assert estimates_s[1] > 2 * estimates_s[0]


def completed(problem: Problem, *chains: str) -> Completion:
    """Chains of one GPU of each named node."""
    structure: tuple[Chain, ...] = tuple(tuple(Unit(n, (0,)) for n in of) for of in chains)
    completer = Completer(problem)
    found = completer.complete(structure, completer.own_size)
    assert found is not None
    return found


@pytest.mark.parametrize("chains", [("a", "b"), ("a", "b", "c"), ("ab", "cd"), ("a", "bcd")])
@pytest.mark.parametrize("tied", [False, True])
def test_on_links_of_their_own_rings_are_priced_nearly_exactly(
    chains: tuple[str, ...], tied: bool
) -> None:
    cluster = make_cluster(*[(name, FAST, 1) for name in "abcd"], between=Link(1e9, 1e-6))
    workload = make_workload(8, 1024, global_batch_size=12, tied_embeddings=tied)
    problem = make_problem(without_lines(cluster), workload)
    found = completed(problem, *chains)
    placement = found.placement(1)
    exact_s = problem.costs.sync_s(placement, problem.costs.vocab_rows(placement.widths))
    assert Tails(problem).estimate_s(found) == pytest.approx(exact_s, rel=0.2)


def test_one_replica_exchanges_tied_words_alone() -> None:
    found_s = {}
    for tied in (False, True):
        workload = make_workload(8, 1024, global_batch_size=12, tied_embeddings=tied)
        problem = make_problem(
            make_cluster(("a", FAST, 1), ("b", FAST, 1), between=Link(1e9, 1e-6)), workload
        )
        found_s[tied] = Tails(problem).estimate_s(completed(problem, "ab"))
    # There and back, half of 1,000 words in 1,024 numbers of 4 bytes each way.
    assert found_s == {False: 0.0, True: pytest.approx(1000 * 1024 * 4 / 1e9 + 2 * 1e-6)}


def test_a_ring_takes_about_as_long_among_more_nodes() -> None:
    """2 (n - 1) / n of the bytes cross each link; latencies add up."""
    cluster = make_cluster(*[(name, FAST, 1) for name in "abcd"], between=Link(1e8, 0.0))
    problem = make_problem(without_lines(cluster), make_workload(8, 1024, global_batch_size=12))
    two, three, four = (
        Tails(problem).estimate_s(completed(problem, *"abcd"[:n])) for n in (2, 3, 4)
    )
    assert (three / two, four / two) == pytest.approx((4 / 3, 3 / 2))
