"""Running the strategies."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.planner.constructive import Constructive
from megatron_hetero.planner.exhaustive import Exhaustive
from megatron_hetero.planner.launch_ahead import LaunchAhead
from megatron_hetero.planner.local import LocalSearch
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.strategy import Strategy
from megatron_hetero.planner.symmetric import Symmetric


def default_strategies() -> tuple[Strategy, ...]:
    """In the order in which they run: later ones improve on what earlier ones left on the board."""
    return (Symmetric(), Exhaustive(), Constructive(), LocalSearch(), LaunchAhead())


def search(
    problem: Problem,
    progress: Progress | None = None,
    strategies: Sequence[Strategy] | None = None,
) -> Scoreboard:
    """Run strategies one after the other on one board."""
    board = Scoreboard(problem, progress)
    for strategy in default_strategies() if strategies is None else strategies:
        strategy.search(board)
    return board
