"""Running the strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_hetero.collector import no_collector
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.dealt_search import DealtSearch
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.hexiscale.strategy import HexiScale
from megatron_hetero.planner.objectives.fewer import FewerMachines
from megatron_hetero.planner.oracle.exact import Exact
from megatron_hetero.planner.oracle.exhaustive import Exhaustive
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.sharded_search import ShardedSearch
from megatron_hetero.planner.strategy import Strategy
from megatron_hetero.planner.structure_search import StructureSearch

_THOROUGH = 10
"""`thorough` goes on so many times as long."""


def default_strategies(effort: int = 1) -> tuple[Strategy, ...]:
    """Return the strategies of a search, in running order.

    `effort` is that of the search over structures.

    The first two bring structures, the search over structures goes on from them, the next looks at
    every plan of a very small problem, and the last at experts dealt out over replicas.
    """
    return (
        Columns(),
        Symmetric(),
        StructureSearch(effort=effort),
        Exhaustive(),
        DealtSearch(),
    )


STRATEGIES: Mapping[str, Callable[[], Sequence[Strategy]]] = {
    "auto": default_strategies,
    "columns": lambda: (Columns(),),
    "constructive": lambda: (Constructive(),),
    "exact": lambda: (Exact(),),
    "hexiscale": lambda: (HexiScale(),),
    "symmetric": lambda: (Symmetric(),),
    "symmetric-even": lambda: (Symmetric(even_layers=True),),
    "thorough": lambda: default_strategies(_THOROUGH),
}
"""Strategies of `plan --strategy NAME`, run in turn on a single board.

A strategy of its own is a file with a class that keeps to `strategy.Strategy`, and a line here.
"""


_REPLACED = {"structures": "auto"}
"""Former names of strategies, and the names in use."""


def strategies_of(name: str) -> Sequence[Strategy]:
    """Return the strategies behind a name.

    Raises:
        UsageError: no strategy has this name.
    """
    if name in _REPLACED:
        raise UsageError(
            f'the strategy "{name}" is the default now: use {_REPLACED[name]}, or leave --strategy '
            "away"
        )
    if name not in STRATEGIES:
        raise UsageError(f'there is no strategy "{name}"; choose {", ".join(sorted(STRATEGIES))}')
    return STRATEGIES[name]()


def search(
    problem: Problem,
    progress: Progress | None = None,
    strategies: Sequence[Strategy] | None = None,
) -> Scoreboard:
    """Run strategies in turn on a single board. If the objective or a limit of money may want fewer
    machines, the strategies also run on selections of the machines (`fewer`), whatever the
    strategy. If plans may have sharded layers, the search for sharded layers runs too. Interrupted
    (Ctrl-C) with a plan found, the search ends at once and the board says so.

    Raises:
        KeyboardInterrupt: interrupted before any plan was found.
    """
    board = Scoreboard(problem, progress)
    chosen = [*(default_strategies() if strategies is None else strategies), ShardedSearch()]
    try:
        with no_collector():
            # Without a GPU that can be used there is nothing to search.
            if problem.nodes:
                _run(board, chosen)
    except KeyboardInterrupt:
        if board.best is None:
            raise
        board.interrupted = True
    return board


def _run(board: Scoreboard, strategies: Sequence[Strategy]) -> None:
    for strategy in strategies:
        strategy.search(board)
    # Fewer machines pay for money and numbers of GPUs only.
    if not _may_gain_from_fewer(board):
        return
    FewerMachines(lambda: strategies).search(board)
    # Structures on fewer machines are new starts for the search.
    for strategy in strategies:
        if isinstance(strategy, StructureSearch | ShardedSearch):
            strategy.search(board)


def _may_gain_from_fewer(board: Scoreboard) -> bool:
    """Return whether fewer machines may be better; not where even all of them are too slow."""
    problem = board.problem
    objective, first = problem.objective, board.nearest
    if board.is_exact or not objective.may_want_fewer(problem.cluster):
        return False
    too_slow = first is not None and not first.keeps_limits
    return objective.needs_prices(problem.cluster) or not too_slow
