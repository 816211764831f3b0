"""The search for a fleet: which candidates are settled, and the order of machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.milp import serve_most
from megatron_hetero.serving.fleet import search
from megatron_hetero.serving.fleet.forecast import simulate
from megatron_hetero.serving.fleet.offers import make_fleet
from megatron_hetero.serving.fleet.pools import pools_of
from megatron_hetero.serving.fleet.search import FoundFleet, search_fleet
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.workload.load import load_request_mix

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"
SERVED = load_served(EXAMPLE, "16-bit", "16-bit")
MIX = load_request_mix(EXAMPLE / "workload.yaml")
_MACHINES = (
    "  - {name: %s, gpu: L40S, count: 1, price_per_hour: 3.9}\n",
    "  - {name: %s, gpu: L40S, count: 2, price_per_hour: 9.1}\n",
    "  - {name: %s, gpu: L40S, count: 2, price_per_hour: 8.0}\n",
    "  - {name: %s, gpu: A10G, count: 2, price_per_hour: 2.0}\n",
)


def _cluster(folder: Path, order: tuple[int, ...]) -> Any:
    nodes = "".join(_MACHINES[i] % f"m{place}" for place, i in enumerate(order))
    text = (
        f"version: 1\nnodes:\n{nodes}links:\n"
        "  inside_node: {L40S: {bandwidth: 25 GB/s, latency: 12 us}, "
        "A10G: {bandwidth: 20 GB/s, latency: 12 us}}\n"
        "  between_nodes: {bandwidth: 100 Gb/s, latency: 10 us}\n"
    )
    (folder / "cluster.yaml").write_text(text)
    return load_cluster(folder / "cluster.yaml")


def test_the_order_of_machines_in_the_file_is_nothing(tmp_path: Path) -> None:
    """Of equally good answers of the programme the same one is found, and so the same queues."""
    found = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        cluster = _cluster(tmp_path, order)
        pools = [(p.name, p.gpus_per_machine, p.machine_price) for p in pools_of(cluster)]
        fleet = make_fleet(cluster, SERVED, ENGINES["vllm"], MIX)
        made = serve_most(fleet.composing())
        outcome, _ = simulate(fleet, made, 0.9 * made.scale, 5.0)
        found.append((pools, made.counts, outcome.overall))
    assert found[0] == found[1] == found[2]
    assert [name for name, *_ in found[0][0]] == [
        "A10G at main", "L40S at main", "L40S at main (2)", "L40S at main (3)"
    ]  # fmt: skip


def test_the_best_of_settled_runs_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A brief run that ends before batches are full promises most, and keeps least."""
    cluster = _cluster(tmp_path, (0, 1, 2, 3))
    fleet = make_fleet(cluster, SERVED, ENGINES["vllm"], MIX)
    whole = serve_most(fleet.composing())
    # Scale -> load in a brief run, and in a settled one.
    kept = {1.0: (9.0, 2.0), 2.0: (8.0, 7.0), 3.0: (6.9, 6.9)}
    settled = []

    def judged(*given: Any, is_settled: bool = False) -> FoundFleet:
        made = given[1]
        if is_settled:
            settled.append(made.scale)
        run = search.JudgedRun(*simulate(fleet, whole, 0.1 * whole.scale, 2.0), None)
        return FoundFleet(made, whole, run, kept[made.scale][is_settled], 1.0)

    scales = iter(kept)
    monkeypatch.setattr(search, "_goodput", judged)
    monkeypatch.setattr(search, "_improved", lambda fleet, best, *_: best)
    whole_first = iter([whole])

    def made(*_: Any) -> Any:
        # The first answer is the one whose bound counts.
        return next(whole_first, None) or replace(whole, scale=next(scales))

    monkeypatch.setattr(search, "serve_most", made)
    found = search_fleet(fleet, "goodput")
    assert (found.composition.scale, found.load) == (2.0, 7.0)
    # What a brief run finds below that need not be settled.
    assert 3.0 not in settled
    kept.update({1.0: (0.0, 0.0), 2.0: (0.0, 0.0), 3.0: (0.0, 0.0)})
    scales, whole_first = iter(kept), iter([whole])
    with pytest.raises(InfeasiblePlanError, match="no load is so light"):
        search_fleet(fleet, "goodput")
