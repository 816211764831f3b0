"""Running the strategies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron_hetero.errors import UsageError
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.hexiscale.strategy import HexiScale
from megatron_hetero.planner.machines.fewer import FewerMachines
from megatron_hetero.planner.moves.annealing import Annealing
from megatron_hetero.planner.moves.exchanges import Exchanges
from megatron_hetero.planner.moves.launch_ahead import LaunchAhead
from megatron_hetero.planner.moves.local import LocalSearch
from megatron_hetero.planner.moves.other_settings import OtherSettings
from megatron_hetero.planner.moves.refine import Refine
from megatron_hetero.planner.oracle.exact import Exact
from megatron_hetero.planner.oracle.exhaustive import Exhaustive
from megatron_hetero.planner.oracle.prune import Effort
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.constructive import Constructive
from megatron_hetero.planner.shapes.equal_replicas import EqualReplicas
from megatron_hetero.planner.shapes.symmetric import Symmetric
from megatron_hetero.planner.strategy import Strategy
from megatron_hetero.planner.structure_search import StructureSearch

_FEW_GPUS = 16
"""In larger clusters these strategies take longest, and found nothing under other settings."""
_MANY_GPUS = 64
"""In larger clusters plans of equal parts would take the places of better starts."""
_SMALL_EFFORT = Effort(max_placements=1_000, max_structures=5_000, max_splits=30_000)


def default_strategies() -> tuple[Strategy, ...]:
    """In the order in which they run: later ones improve on what earlier ones left on the board."""
    return (
        Columns(),
        Symmetric(),
        Exhaustive(),
        Constructive(),
        EqualReplicas(),
        LocalSearch(),
        LaunchAhead(),
        Refine(),
        EqualReplicas(launch_ahead=True),
        Exchanges(),
        LaunchAhead(),
        Refine(),
        OtherSettings(_shape_strategies),
    )


class Structures:
    """One search over structures that knows each stage's settings from the start, from seeds of
    `Columns`, grids and equal replicas; in clusters of up to `max_gpus`.

    In larger ones, and for prices that know no settings of a stage, the default strategies run.
    """

    name = "structures"

    def __init__(self, max_gpus: int = 256) -> None:
        self.max_gpus = max_gpus

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        for strategy in self.parts(board.problem):
            strategy.search(board)

    def parts(self, problem: Problem) -> Sequence[Strategy]:
        """In the order in which they run."""
        costs = problem.costs
        knows_settings = costs.has_variants and costs.has_launch_counts
        if not knows_settings or problem.num_gpus > self.max_gpus:
            return default_strategies()
        return (
            Columns(),
            Symmetric(),
            EqualReplicas(launch_ahead=True),
            StructureSearch(),
            Exhaustive(),
            Exchanges(),
            Refine(),
        )


def _shape_strategies(num_gpus: int) -> Sequence[Strategy]:
    """What finds shapes under other settings than the job's."""
    if num_gpus > _MANY_GPUS:
        return Columns(), EqualReplicas(), EqualReplicas(launch_ahead=True)
    return (
        Columns(),
        Symmetric(),
        Exhaustive(_SMALL_EFFORT),
        Constructive(max_gpus=_FEW_GPUS),
        EqualReplicas(),
        LocalSearch(max_gpus=_FEW_GPUS),
        LaunchAhead(),
        EqualReplicas(launch_ahead=True),
        Exchanges(),
        LaunchAhead(),
    )


STRATEGIES: Mapping[str, Callable[[], Sequence[Strategy]]] = {
    "auto": default_strategies,
    "columns": lambda: (Columns(),),
    "constructive": lambda: (Constructive(max_gpus=None),),
    "exact": lambda: (Exact(),),
    "hexiscale": lambda: (HexiScale(),),
    "structures": lambda: (Structures(),),
    "symmetric": lambda: (Symmetric(),),
    "symmetric-even": lambda: (Symmetric(even_layers=True),),
    "thorough": lambda: (*default_strategies(), Annealing(), LaunchAhead(), Refine()),
}
"""What `plan --strategy NAME` runs: strategies one after the other on one board.

A strategy of its own is a file with a class that keeps to `strategy.Strategy`, and a line here.
"""


def strategies_of(name: str) -> Sequence[Strategy]:
    """The strategies behind a name.

    Raises:
        UsageError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise UsageError(f'there is no strategy "{name}"; choose {", ".join(sorted(STRATEGIES))}')
    return STRATEGIES[name]()


def search(
    problem: Problem,
    progress: Progress | None = None,
    strategies: Sequence[Strategy] | None = None,
) -> Scoreboard:
    """Run strategies one after the other on one board.

    Where the objective or a limit of money may want fewer machines than there are, they run on
    selections of the machines as well (`fewer`), whatever the strategy.

    Interrupted (Ctrl-C) with a plan found, it ends at once and the board says so.

    Raises:
        KeyboardInterrupt: interrupted before any plan was found.
    """
    board = Scoreboard(problem, progress)
    chosen = default_strategies() if strategies is None else strategies
    try:
        with no_collector():
            _run(board, chosen)
    except KeyboardInterrupt:
        if board.best is None:
            raise
        board.interrupted = True
    return board


def _run(board: Scoreboard, given: Sequence[Strategy]) -> None:
    strategies: list[Strategy] = []
    for strategy in given:
        if isinstance(strategy, Structures):
            strategies += strategy.parts(board.problem)
        else:
            strategies.append(strategy)
    for strategy in strategies:
        strategy.search(board)
    if not _may_gain_from_fewer(board):
        return
    FewerMachines(lambda: strategies).search(board)
    for strategy in strategies:
        if isinstance(strategy, LocalSearch | LaunchAhead | StructureSearch | Refine):
            strategy.search(board)


@contextmanager
def no_collector() -> Iterator[None]:
    """Without Python's collector of cycles: a search keeps many small objects, in no cycles, and to
    look through them again and again takes a sixth of its time, and of what is asked after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _may_gain_from_fewer(board: Scoreboard) -> bool:
    """Whether fewer machines may be better; not where even all of them are too slow."""
    problem = board.problem
    objective, first = problem.objective, board.nearest
    if board.is_exact or not objective.may_want_fewer(problem.cluster):
        return False
    too_slow = first is not None and not first.keeps_limits
    return objective.needs_prices(problem.cluster) or not too_slow
