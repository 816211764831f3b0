"""Groups of unlike cards: where they win, and the search beside every group of a box.

    python tools/bench_groups.py [--only TEXT ...] [--batch N] [--tokens N] [--all]

For each machine of `benchmarks/boxes` and each model, the step of the plan without and with
groups in unequal shares: of tensors, and, with --tokens, of sequences of so many, which Megatron's
local layers divide.  --all: and the best of every division of the cards (or of
some of them) into groups, of groups into pipelines in every order, filled as the search fills its
own; in boxes of up to four cards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.cluster.file.description import load_cluster  # noqa: E402
from megatron_hetero.cluster.spec import Cluster, Device  # noqa: E402
from megatron_hetero.cost.model import CostModel  # noqa: E402
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement  # noqa: E402
from megatron_hetero.errors import InfeasiblePlanError  # noqa: E402
from megatron_hetero.model.load import load_workload  # noqa: E402
from megatron_hetero.model.spec import Workload  # noqa: E402
from megatron_hetero.plan.layout import format_layout  # noqa: E402
from megatron_hetero.planner import plan_cluster  # noqa: E402
from megatron_hetero.planner.completion.stage_options import StagePlace  # noqa: E402
from megatron_hetero.planner.evaluate.rungs import THOROUGH, Rungs  # noqa: E402
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard  # noqa: E402
from megatron_hetero.planner.moves.group_shares import GroupShares  # noqa: E402
from megatron_hetero.planner.problem import Problem, chains_of, make_problem  # noqa: E402

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


def rows(only: Sequence[str], batch: int | None, tokens: int | None, every: bool) -> Iterator[str]:
    """Yield the rows of the table of a page.

    Args:
        only: texts, one of which is in the name of machine and model; none is all.
        batch: sequences of a step; None is the model's.
        tokens: of a sequence, in local layers; None is the model's, in Transformer Engine's.
        every: also every group of small boxes.
    """
    heads = ["machine, model", "sequences", "without", "with", "gain", "layout"]
    yield f"| {' | '.join([*heads, *(['every group', 'behind'] if every else [])])} |"
    yield f"| --- | --: | --: | --: | --: | --- |{' --: | --: |' if every else ''}"
    for machine in sorted(FOLDER.glob("*.yaml")):
        cluster = load_cluster(machine)
        has_bf16 = all(node.gpu_type.peak_flops["bf16"] for node in cluster.nodes)
        flags = ["--bf16" if has_bf16 else "--fp16"]
        flags += [f"--global-batch-size={batch}"] if batch else []
        if tokens:
            flags += [f"--seq-length={tokens}", f"--max-position-embeddings={tokens}"]
            flags += ["--transformer-impl=local", "--use-distributed-optimizer"]
        for model in sorted((FOLDER / "models").glob("*.flags")):
            name = f"{machine.stem}, {model.stem}"
            if not only or any(text in name for text in only):
                yield _row(name, cluster, load_workload(model, flags), every)


def _row(name: str, cluster: Cluster, workload: Workload, every: bool) -> str:
    batch = workload.training.global_batch_size
    even = replace(cluster.limits, as_given=(*cluster.limits.as_given, "shares"))
    found = {}
    for choice, limits in (("without", even), ("with", cluster.limits)):
        try:
            plan = plan_cluster(replace(cluster, limits=limits), workload)
        except InfeasiblePlanError:
            continue
        assert plan.estimates is not None
        found[choice] = plan.estimates.step_time_s, format_layout(plan.layout)
    without, with_shares = found.get("without"), found.get("with")
    cells = [name, str(batch), *(f"{f[0]:.3f} s" if f else "-" for f in (without, with_shares))]
    has_groups = with_shares is not None and "(" in with_shares[1]
    gain = f"{without[0] / with_shares[0] - 1:.1%}" if without and with_shares else ""
    layout = f"`{with_shares[1]}`".replace("|", "\\|") if with_shares else ""
    cells += [gain if has_groups else "none", layout]
    if every:
        best_s = best_of_all_s(cluster, workload) if len(cluster.devices) <= _MAX_CARDS else None
        cells.append("-" if best_s is None else f"{best_s:.3f} s")
        cells.append(f"{with_shares[0] / best_s - 1:.1%}" if best_s and with_shares else "-")
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=())
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of a step (default: 64)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a sequence, in local layers")
    parser.add_argument("--all", action="store_true", help="every group of boxes of up to 4 cards")
    options = parser.parse_args(arguments)
    for line in rows(options.only, options.batch, options.tokens, options.all):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
