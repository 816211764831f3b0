"""When nothing fits: which GPU lacks how much, and the smallest change that is known to help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import HeteroError, InfeasiblePlanError
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.planner.advise.capacity import MoreGpus, may_fit, may_fit_proves
from megatron_hetero.planner.advise.nothing_fits.relaxations import (
    Settings,
    larger_nodes,
    limit_changes,
    more_words,
    nodes_to_copy,
    settings_changes,
    with_more,
)
from megatron_hetero.planner.advise.nothing_fits.tries import Tries
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.first_fit import FirstFit, with_least_settings
from megatron_hetero.units import format_bytes

_MAX_MORE_GPUS = 128
_MAX_WORK = 800
"""Limit of the searches with as many changes of settings, in GPUs searched: a few seconds."""


@dataclass(frozen=True)
class Relaxation:
    """Changes that each make a plan fit, each with fewer GPUs than the change before.

    `is_smallest`: no plan fits with less, not merely none was found.  Settings of the job count
    less than limits of the cluster, and these less than GPUs.
    """

    words: tuple[str, ...]
    is_smallest: bool


def infeasible_error(problem: Problem, board: Scoreboard) -> InfeasiblePlanError:
    """Return the error to raise.  Every relaxation it names was planned with, and fits; where
    none did, it names those that were tried."""
    finder = _Finder(problem)
    relaxation = finder.find()
    sentences = [_shortage(problem, board.out_of_memory.nearest)]
    if relaxation is None:
        sentences.append(finder.tries.words())
    else:
        which = "Smallest relaxation" if relaxation.is_smallest else "A relaxation"
        words = "; or ".join(relaxation.words)
        sentences.append(f"{which} that fits (planned and checked): {words}.")
    return InfeasiblePlanError(" ".join(sentences))


class _Finder:
    """Tries changes, with a limit on searches; remembers what it tried, and whether each refusal
    was a proof."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.settings = settings_changes(problem)
        self.bound_proves = may_fit_proves(problem)
        self.all_proved = self.bound_proves
        self.tries = Tries()
        self.work = 0

    def find(self) -> Relaxation | None:
        """Try settings alone, then limits with settings, then GPUs with settings."""
        words = self._settings_alone() or self._limits() or self._gpus()
        return Relaxation(words, self.all_proved) if words else None

    def _settings_alone(self) -> tuple[str, ...]:
        for settings in self.settings:
            # The job as it is does not fit, which is why this was asked.
            if not settings.num_changes:
                continue
            fits = self._fits(self.problem.cluster, settings)
            if fits:
                return (settings.words, *self._in_other_precision(settings))
            # None was not tried, and is not named.
            if fits is not None:
                self.tries.settings.append(settings.words)
        return ()

    def _in_other_precision(self, fitting: Settings) -> Iterator[str]:
        """Yield the same change in another precision, where that fits too: fp16 for the whole job
        and for single stages are unlike trainings, between which the reader chooses."""

        def without_precision(training: TrainingSpec) -> TrainingSpec:
            return replace(training, precision="bf16", mixes_precisions=False)

        # Equal but for the precision, and as few changes.
        for settings in self.settings:
            is_other = settings is not fitting and settings.num_changes == fitting.num_changes
            same = without_precision(settings.training) == without_precision(fitting.training)
            if is_other and same and self._fits(self.problem.cluster, settings):
                yield settings.words

    def _limits(self) -> tuple[str, ...]:
        few = self._few_settings()
        for words, limits in limit_changes(self.problem.cluster):
            relaxed = replace(self.problem.cluster, limits=limits)
            for settings in few:
                both = f"{words} and {settings.words}" if settings.words else words
                fits = self._fits(relaxed, settings)
                if fits:
                    return (both,)
                if fits is not None:
                    self.tries.limits.append(both)
        return ()

    def _gpus(self) -> tuple[str, ...]:
        """Return the fewest GPUs with the settings as given, then with one change, two changes, and
        so on while the number of GPUs falls."""
        found: list[str] = []
        num_gpus = _MAX_MORE_GPUS + 1
        few = self._few_settings()
        # More changes of settings count only where they save GPUs.
        for num_changes in range(1 + max(s.num_changes for s in few)):
            options = [s for s in few if s.num_changes == num_changes]
            fewest = self._fewest(options, num_gpus)
            if fewest is None:
                continue
            settings, more = fewest
            num_gpus = more.num_gpus
            words = more_words(self.problem.cluster, more)
            if settings.words:
                words = f"with {settings.words}, {words}"
            found.append(words)
            if num_gpus == 1:
                break
        return tuple(found)

    def _few_settings(self) -> list[Settings]:
        """Take, beside limits and GPUs, of the micro-batches only the present and the smallest."""
        sizes = (1, self.problem.workload.training.micro_batch_size)
        return [s for s in self.settings if s.training.micro_batch_size in sizes]

    def _fewest(self, options: list[Settings], below: int) -> tuple[Settings, MoreGpus] | None:
        """Return the fewest GPUs of a type with one of `options`, in nodes like the present nodes;
        if none fits, in larger nodes."""
        fewest = None
        # Nodes like those of the cluster come first, servers of eight only where none of them does.
        for nodes_of in (nodes_to_copy, larger_nodes):
            self.work = 0
            pairs: list[tuple[int, int, Settings, Node]] = []
            for settings in options:
                for node in nodes_of(self._nodes(), settings.training):
                    # The bound gives the number to begin with.
                    least = _first_true(partial(self._more_may_fit, settings, node), below)
                    if least is not None:
                        pairs.append((least, len(pairs), settings, node))
                    elif self.bound_proves:
                        self.tries.excluded(settings, MoreGpus(node, below - 1))
                    else:
                        pairs.append((below - 1, len(pairs), settings, node))
            # The smallest possible numbers first: each success lowers the limit for all others.
            for least, _, settings, node in sorted(pairs, key=lambda pair: pair[:2]):
                num_gpus = self._fewest_of(settings, node, least, below)
                if num_gpus is not None:
                    fewest, below = (settings, MoreGpus(node, num_gpus)), num_gpus
            if fewest is not None:
                return fewest
        return None

    def _fewest_of(self, settings: Settings, node: Node, least: int, below: int) -> int | None:
        """Go from the number that the bound leaves possible, upwards until a plan is found, and
        back to the fewest."""

        def plans(num_gpus: int) -> bool:
            more = MoreGpus(node, num_gpus)
            fits = self._plans(with_more(self.problem.cluster, more), settings)
            if fits is False:
                self.tries.failed(settings, more)
            self.all_proved &= bool(fits)
            return bool(fits)

        # Steps double until a plan is found, then bisection between the last failure and it.
        failed, num_gpus, step = least - 1, least, 1
        while num_gpus < below and not plans(num_gpus):
            failed, num_gpus, step = num_gpus, num_gpus + step, 2 * step
        if num_gpus >= below:
            return None
        while num_gpus - failed > 1:
            middle = (failed + num_gpus) // 2
            failed, num_gpus = (failed, middle) if plans(middle) else (middle, num_gpus)
        return num_gpus

    def _more_may_fit(self, settings: Settings, node: Node, num_gpus: int) -> bool:
        return self._may_fit(self.problem.cluster, settings, MoreGpus(node, num_gpus))

    def _fits(self, cluster: Cluster, settings: Settings) -> bool | None:
        """Return whether a plan is found; None where that was not tried."""
        # A proof by capacity is quicker than a search.
        if self.bound_proves and not self._may_fit(cluster, settings):
            return False
        fits = self._plans(cluster, settings)
        self.all_proved &= bool(fits)
        return fits

    def _may_fit(self, cluster: Cluster, settings: Settings, more: MoreGpus | None = None) -> bool:
        relaxed = self._relaxed(cluster, settings)
        return relaxed is not None and may_fit(with_least_settings(relaxed), more)

    def _plans(self, cluster: Cluster, settings: Settings) -> bool | None:
        """Return whether a plan is found; None where that was not tried."""
        relaxed = self._relaxed(cluster, settings)
        # Beyond the limit of work nothing is said, neither yes nor no.
        if relaxed is None or self.work > _MAX_WORK:
            return None
        self.work += relaxed.num_gpus
        board = Scoreboard(relaxed)
        FirstFit().search(board)
        return board.best is not None

    def _nodes(self) -> list[Node]:
        """Return nodes whose GPUs may join the plan's."""
        cluster = self.problem.cluster
        return [n for n in cluster.nodes if cluster.library in (None, n.gpu_type.library)]

    def _relaxed(self, cluster: Cluster, settings: Settings) -> Problem | None:
        """Return None when the change is not a valid job; the next one may be."""
        workload = replace(self.problem.workload, training=settings.training)
        try:
            return make_problem(
                cluster, workload, self.problem.costs.profile, self.problem.make_costs
            )
        except HeteroError:
            return None


def _first_true(holds: Callable[[int], bool], below: int) -> int | None:
    """Return the least number in 1 .. below - 1 for which `holds`, which then holds for all
    larger."""
    # Doubling finds an interval, bisection the least number in it.
    low, high = 0, 1
    while high < below and not holds(high):
        low, high = high, 2 * high
    if high >= below:
        high = below - 1
        if high <= low or not holds(high):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _shortage(problem: Problem, miss: Candidate | None) -> str:
    """Return the shortage of the attempt closest to fitting."""
    training = problem.workload.training
    # Not one attempt was priced: no GPU, or no arrangement.
    if miss is None:
        if not problem.nodes:
            precision = "fp8" if training.fp8 else training.precision
            return (
                f"No plan fits: no GPU of the cluster can be used (in {precision}, "
                "under its limits)."
            )
        return (
            "No plan fits: the limits, the number of layers and the number of micro-batches "
            f"({problem.num_layers}, {problem.num_micro_batches}) leave no arrangement of "
            f"{problem.num_gpus} GPUs."
        )
    # The stage that lacks most, and the largest part of its memory.
    r, s = max(
        (
            (r, s)
            for r, replica in enumerate(miss.cost.replicas)
            for s in range(len(replica.stages))
        ),
        key=lambda place: miss.cost.replicas[place[0]].stages[place[1]].missing_bytes,
    )
    stage, cost = miss.placement.replicas[r].stages[s], miss.cost.replicas[r].stages[s]
    node = problem.cluster.node_by_name[stage.devices[0].node]
    parts = cost.memory.parts_bytes(stage.num_layers)
    largest = max(sorted(parts), key=lambda part: parts[part])
    return (
        f"No plan fits: in the attempt that came closest, stage {s} of replica {r} "
        f"({stage.num_layers} layers on {stage.width}x {node.gpu_type.name}, {node.machine}) needs "
        f"{format_bytes(cost.missing_bytes)} more on each GPU than "
        f"its {format_bytes(cost.memory.capacity_bytes)}, at micro-batch "
        f"{training.micro_batch_size}; most goes to {largest} ({format_bytes(parts[largest])})."
    )
