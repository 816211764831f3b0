"""What a mixed fleet serves for a dollar, beside fleets of one type and AIConfigurator's answer.

    python tools/bench serving-costs [--budget 30] [--out FILE]

Llama-3.1-8B, three classes of requests in three mixes, three lists of prices of a GPU-hour, each
row with its source; two rows of the first list are unverified (`PRICES`).  For each list and mix,
in rates and by our prices: what another fleet serves within the budget, and what ours serves for
the same money.  Others are the best of each type of GPU; the best symmetric fleet, whose replicas
all have one width and get the same mix of requests; and, of the two types that AIConfigurator has
tables of, its own answer, a single type and shape, against our fleet of the same two types in
**its** rates
(`benchmarks/tables/aiconfigurator-serving.json`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.milp import serve_most
from megatron_hetero.serving.compose.problem import Composing, Offer, Rentable, Resource
from megatron_hetero.serving.fleet.offers import Fleet, make_fleet
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix, TokenLengths
from tools.bench.jobs import ROOT
from tools.bench.show import Columns, option

_MELANGE = "melange/config/example.json of tyler-griggs/melange-release at d46ab43"
_CATALOGUE = (
    "1x_{}_SECURE of catalogs/v6/runpod/vms.csv of skypilot-org/skypilot-catalog at 098741e, the "
    "same in all eight regions"
)
_PAGE = "deploybase.ai/articles/runpod-gpu-pricing of 2026-03-10, third-party, on demand: {}"
PRICES = {
    "2024-04, after Melange": {
        "L4": (0.70, "unverified: written from memory of the paper (arXiv 2404.14527); "
        "lillytechsystems.com has 0.70 on Google Cloud in a table of 2025"),
        "A10G": (1.01, _MELANGE),
        "A100-80GB": (3.67, _MELANGE),
        "H100-80GB": (7.516, "unverified: written from memory of the paper (arXiv 2404.14527)"),
    },
    "RunPod, of SkyPilot's catalogue": {
        "RTX-4090": (0.74, _CATALOGUE.format("RTX4090")),
        "L40": (1.14, _CATALOGUE.format("L40")),
        "A100-80GB": (2.29, _CATALOGUE.format("A100-80GB-SXM")),
        "H100-80GB": (4.69, _CATALOGUE.format("H100-SXM")),
    },
    "RunPod, 2026-03": {
        "RTX-4090": (0.60, _PAGE.format("RTX 4090")),
        "L40": (1.22, _PAGE.format("L40")),
        "A100-80GB": (2.45, _PAGE.format("A100 SXM")),
        "H100-80GB": (4.76, _PAGE.format("H100 SXM")),
    },
}  # fmt: skip
"""Price of a GPU-hour in US dollars and where it stands, by list and card.  The catalogue's commit
could be read without its day."""
CLASSES = {"chat": (824, 253, 2.0, 0.1), "documents": (2455, 250, 5.0, 0.15),
           "writing": (300, 1000, 2.0, 0.1)}  # fmt: skip
MIXES = {"talk": (0.7, 0.1, 0.2), "read": (0.2, 0.7, 0.1), "write": (0.2, 0.1, 0.7)}
MACHINES, GPUS = 6, 4
AICONFIGURATOR = ROOT / "benchmarks" / "tables" / "aiconfigurator-serving.json"
_GAP = 2e-3


def mix_of(shares: Sequence[float]) -> RequestMix:
    """Return the classes with parts of ten requests a second."""
    kinds = zip(CLASSES.items(), shares, strict=True)
    return RequestMix(tuple(
        RequestClass(name, 10 * share, TokenLengths(((i, 1.0),)), TokenLengths(((o, 1.0),)), f, b)
        for (name, (i, o, f, b)), share in kinds
    ))  # fmt: skip


def cluster_of(prices: Mapping[str, float], folder: Path) -> Any:
    """Return machines of four GPUs, rented by the GPU-hour."""
    nodes = "".join(
        f"  - {{name: {gpu.lower()}-{i}, gpu: {gpu}, count: {GPUS}}}\n"
        for gpu in prices for i in range(MACHINES)
    )  # fmt: skip
    types = "".join(f"  {g}: {{price_per_hour: {p}}}\n" for g, p in prices.items())
    links = "".join(
        f"    {g}: {{bandwidth: {'200' if 'H100' in g or 'A100' in g else '20'} GB/s, "
        "latency: 8 us}\n" for g in prices
    )  # fmt: skip
    text = (
        f"version: 1\nnodes:\n{nodes}gpu_types:\n{types}links:\n  inside_node:\n{links}"
        "  between_nodes: {bandwidth: 100 Gb/s, latency: 10 us}\n"
    )
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def best(problem: Composing) -> tuple[float, float]:
    """Return the requests per second of the best fleet within the budget, and what an hour of it
    costs; zeros where none serves all classes."""
    try:
        found = serve_most(problem, gap=_GAP)
    except InfeasiblePlanError:
        return 0.0, 0.0
    return found.scale * sum(problem.demand), found.cost_per_hour


def beside(ours: Composing, other: Composing) -> dict[str, float]:
    """Return what another fleet serves for its money, and what ours serves for the same."""
    rate, cost = best(other)
    if not rate:
        return {"requests_per_s": 0.0, "cost_per_hour": 0.0, "ours": 0.0, "times": 0.0}
    own, _ = best(replace(ours, budget_per_hour=cost * (1 + 1e-9)))
    return {"requests_per_s": rate, "cost_per_hour": cost, "ours": own, "times": own / rate}


def of_type(fleet: Fleet, gpu: str) -> Fleet:
    """Return a fleet's choices on one type of GPU."""
    kept = {
        name: offered for name, offered in fleet.offered.items()
        if {stage.gpu.name for stage in offered.shape.pipeline.stages} == {gpu}
    }  # fmt: skip
    return replace(fleet, offered=kept)


def symmetric(fleet: Fleet, width: int, budget: float) -> Composing:
    """Return the problem of replicas of one width on one machine that all get the same mix."""
    kept = {
        name: offered for name, offered in fleet.offered.items()
        if offered.phase == "both" and [s.width for s in offered.shape.pipeline.stages] == [width]
    }  # fmt: skip
    problem = replace(fleet, offered=kept).composing(budget, routes=(("both",),))
    return mixed(problem)


def mixed(problem: Composing) -> Composing:
    """Return the same with a single class: the mix itself."""
    total = sum(problem.demand)
    offers = []
    for offer in problem.offers:
        if all(rate > 0 for rate in offer.rates):
            time = sum(d / total / r for d, r in zip(problem.demand, offer.rates, strict=True))
            offers.append(replace(offer, rates=(1 / time,), carries=()))
    return replace(
        problem, offers=tuple(offers), demand=(total,), class_names=("mix",),
        hand_over_bytes=(0.0,),
    )  # fmt: skip


def theirs(prices: Mapping[str, float], mix: RequestMix, budget: float) -> dict[str, float]:
    """Return requests per dollar of AIConfigurator's answer, and of ours in its rates."""
    rows = json.loads(AICONFIGURATOR.read_text(encoding="utf-8"))["replicas"]
    cards = [card for card in ("A100-80GB", "H100-80GB") if card in prices]
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["card"] in cards:
            rates.setdefault((row["card"], row["tp"]), {})[row["class"]] = row["requests_per_s"]
    offers = tuple(
        Offer(f"{card} tp{tp}", "both", card, tuple(by_class.get(n, 0.0) for n in CLASSES),
              {card: tp}, tp * prices[card])
        for (card, tp), by_class in rates.items()
    )  # fmt: skip
    number = MACHINES * GPUS
    problem = Composing(
        offers, tuple(Rentable(card, 1) for card in cards),
        tuple(Resource(card, card, number) for card in cards),
        mix.demand, tuple(CLASSES), (("both",),), (0.0,) * len(CLASSES), budget_per_hour=budget,
    )  # fmt: skip
    single = [mixed(replace(problem, offers=(offer,))) for offer in offers]
    # Its answer is the shape that serves most for a dollar.
    shapes = [one for one in single if one.offers]
    answer = max(shapes, key=lambda one: one.offers[0].rates[0] / one.offers[0].price_per_hour)
    return beside(problem, answer)


def row(prices_name: str, mix_name: str, budget: float, folder: Path) -> dict[str, Any]:
    """Return the figures of a list of prices and a mix: requests per dollar."""
    prices = {gpu: price for gpu, (price, _) in PRICES[prices_name].items()}
    mix = mix_of(MIXES[mix_name])
    served = load_served(ROOT / "examples" / "serving", "16-bit", "16-bit")
    fleet = make_fleet(cluster_of(prices, folder), served, ENGINES["vllm"], mix)
    problem = fleet.composing(budget)
    rate, cost = best(problem)
    single = {gpu: beside(problem, of_type(fleet, gpu).composing(budget)) for gpu in prices}
    even = [one for width in (1, 2, 4) if (one := symmetric(fleet, width, budget)).offers]
    return {
        "prices": prices_name, "mix": mix_name, "ours": {"requests_per_s": rate,
        "cost_per_hour": cost}, "single": single,
        "symmetric": beside(problem, max(even, key=lambda one: best(one)[0])),
        "aiconfigurator": theirs(prices, mix, budget),
    }  # fmt: skip


COLUMNS = Columns({
    "prices": "{prices}", "requests": "{mix}",
    "over one type": lambda row: ", ".join(
        f"{gpu} {own['times']:.2f}" for gpu, own in row["single"].items()
    ),
    "over symmetric": "{symmetric[times]:.2f}",
    "over AIConfigurator, its rates": "{aiconfigurator[times]:.2f}",
})  # fmt: skip


OPTIONS = (
    option("--budget", type=float, default=30.0),
    option("--out", type=Path, metavar="FILE", help="rows, means and prices as JSON"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | str]:
    """Compare for each list of prices and mix; yield the means at the end."""
    yield COLUMNS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for prices_name in PRICES:
            for mix_name in MIXES:
                rows.append(row(prices_name, mix_name, given.budget, Path(folder)))
                yield rows[-1]
    ratios = [[v["times"] for v in r["single"].values() if v["times"]] for r in rows]
    means = {
        "over_one_type": mean(ratio for own in ratios for ratio in own),
        "over_best_type": mean(map(min, ratios)),
        "over_symmetric": mean(r["symmetric"]["times"] for r in rows),
        "over_aiconfigurator_in_its_rates": mean(r["aiconfigurator"]["times"] for r in rows),
    }
    yield json.dumps(means)
    if given.out:
        told = {
            "budget_per_hour": given.budget, "prices": PRICES, "means": means,
            "rows": rows,
        }  # fmt: skip
        given.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
