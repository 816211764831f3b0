"""Groups of unlike cards: where they win, and the search beside every group of a box.

    python tools/bench groups [--only TEXT ...] [--batch N] [--tokens N] [--all]

For each machine of `benchmarks/boxes` and each model, the step of the plan without and with
groups in unequal shares: of tensors, and, with --tokens, of sequences of so many, which Megatron's
local layers divide.  --all: and the best of every division of the cards (or of
some of them) into groups, of groups into pipelines in every order, filled as the search fills its
own; in boxes of up to four cards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.evaluate.rungs import THOROUGH, Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.group_shares import GroupShares
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import chains_of
from tools.bench.jobs import ROOT, boxes, plan_or_none, quoted, step_s
from tools.bench.show import Columns, is_chosen, only, option

FOLDER = ROOT / "benchmarks" / "boxes"
_MAX_CARDS = 4

Group = tuple[Device, ...]


def divisions(devices: Sequence[Device]) -> Iterator[tuple[tuple[Group, ...], ...]]:
    """Yield every set of pipelines of groups of these devices, all of them used, once each."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for number in range(len(rest) + 1):
        for others in combinations(rest, number):
            left = [device for device in rest if device not in others]
            for pipeline in _pipelines((first, *others)):
                for further in divisions(left):
                    yield (pipeline, *further)


def _pipelines(devices: Group) -> Iterator[tuple[Group, ...]]:
    """Yield every order of every division into groups."""
    for groups in _groups(devices):
        yield from permutations(groups)


def _groups(devices: Group) -> Iterator[tuple[Group, ...]]:
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for number in range(len(rest) + 1):
        for others in combinations(rest, number):
            for further in _groups(tuple(d for d in rest if d not in others)):
                yield ((first, *others), *further)


def best_of_all_s(cluster: Cluster, workload: Workload) -> float | None:
    """Return the seconds of the best of all divisions of all or some of the cards; None if nothing
    fits."""
    problem = make_problem(cluster, workload)
    board = Scoreboard(problem)
    rungs = Rungs(board)
    for placement in _distinct_placements(problem):
        cost = problem.costs.placement(placement)
        board.keep_refined(placement, cost, "all", None)
        for found in rungs.sizes(tuple(chains_of(placement))):
            rungs.candidate(rungs.completer.tune(found, THOROUGH))
    return None if board.nearest is None else board.nearest.step_time_s


def _distinct_placements(problem: Problem) -> Iterator[Placement]:
    cards = [device for node in problem.nodes for device in node.devices]
    seen = set()
    for number in range(1, len(cards) + 1):
        for chosen in combinations(cards, number):
            for division in divisions(chosen):
                kinds = tuple(sorted(tuple(tuple(d.node for d in g) for g in p) for p in division))
                if kinds not in seen:
                    seen.add(kinds)
                    yield from _placements(problem.costs, division)


def _placements(costs: CostModel, division: tuple[tuple[Group, ...], ...]) -> Iterator[Placement]:
    """Yield the division with every good choice of shares; layers and micro-batches are to be
    filled."""
    model = costs.workload.model
    widths = [len(group) for pipeline in division for group in pipeline]
    if max(widths) > model.num_query_groups or max(map(len, division)) > model.num_layers:
        return
    shares = GroupShares(costs, costs.vocab_rows(widths))
    options = []
    for pipeline in division:
        depth = len(pipeline)
        even = model.num_layers // depth
        layers = [even] * (depth - 1) + [model.num_layers - even * (depth - 1)]
        for index, group in enumerate(pipeline):
            place = StagePlace(group, None, index == 0, index == depth - 1, depth - index)
            found = shares.options(place, layers[index]) if len(group) > 1 else (None,)
            options.append([PlacedStage(group, layers[index], one) for one in found])
    batch, number = costs.workload.training.global_batch_size, len(division)
    for chosen in product(*options):
        stages = iter(chosen)
        yield Placement(
            tuple(
                PlacedReplica(tuple(next(stages) for _ in pipeline), (batch + place) // number)
                for place, pipeline in enumerate(division)
            )
        )


OPTIONS = (
    only("machines and models"),
    option("--batch", type=int, metavar="N", help="sequences of a step (default: 64)"),
    option("--tokens", type=int, metavar="N", help="of a sequence, in local layers"),
    option("--all", action="store_true", help="every group of boxes of up to 4 cards"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Plan each machine and model without groups and with them."""
    heads = ["machine, model", "sequences", "without", "with", "gain", "layout"]
    yield Columns.of([*heads, *(["every group", "behind"] if given.all else [])])
    more = [f"--global-batch-size={given.batch}"] if given.batch else []
    if given.tokens:
        more += [f"--seq-length={given.tokens}", f"--max-position-embeddings={given.tokens}"]
        more += ["--transformer-impl=local", "--use-distributed-optimizer"]
    for machine, path, flag in boxes(FOLDER):
        for model in sorted((FOLDER / "models").glob("*.flags")):
            if is_chosen(name := f"{machine}, {model.stem}", given.only):
                workload = load_workload(model, [flag, *more])
                yield _row(name, load_cluster(path), workload, given.all)


def _row(name: str, cluster: Cluster, workload: Workload, every: bool) -> list[str]:
    even = replace(cluster.limits, as_given=(*cluster.limits.as_given, "shares"))
    without = plan_or_none(replace(cluster, limits=even), workload)
    plan = plan_or_none(cluster, workload)
    steps_s = [step_s(found) if found else None for found in (without, plan)]
    layout = format_layout(plan.layout) if plan else ""
    cells = [name, str(workload.training.global_batch_size)]
    cells += [f"{seconds:.3f} s" if seconds else "-" for seconds in steps_s]
    gain = f"{steps_s[0] / steps_s[1] - 1:.1%}" if steps_s[0] and steps_s[1] else ""
    cells += [gain if "(" in layout else "none", quoted(layout) if plan else ""]
    if every:
        best_s = best_of_all_s(cluster, workload) if len(cluster.devices) <= _MAX_CARDS else None
        cells.append("-" if best_s is None else f"{best_s:.3f} s")
        cells.append(f"{steps_s[1] / best_s - 1:.1%}" if best_s and steps_s[1] else "-")
    return cells
