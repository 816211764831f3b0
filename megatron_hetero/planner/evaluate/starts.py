"""Structures on a board to start a search from: those that promise most, by several measures."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf

from megatron_hetero.planner.completion.completer import Completion
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.tail import Tails
from megatron_hetero.planner.moves.neighbours import Shape, side_by_side
from megatron_hetero.planner.problem import Chain, chains_of


def promising(
    board: Scoreboard,
    tails: Tails,
    complete: Callable[[tuple[Chain, ...]], Completion | None],
    image: Callable[[tuple[Chain, ...]], Hashable],
    shape: Shape,
    most: int,
) -> dict[Hashable, Completion]:
    """Return the best structures of a board by price, by pipelines, and by pipelines and exchange,
    in turn; what lacks memory as the job's flags say is among them, and so is each structure with
    the groups of a replica side by side (`neighbours.side_by_side`).

    Args:
        complete: gives a structure its layers and settings; None where it does not fit.
        image: equal for structures in which like nodes are exchanged.
        shape: equal for replicas that are alike.
        most: structures in all.

    Returns:
        The completed structures by their images.
    """
    prices_s: dict[Hashable, tuple[tuple[Chain, ...], float]] = {}
    for candidate in (*board.ranking_of_all, *board.out_of_memory.fastest):
        if candidate.placement.has_shares:
            continue  # its width may divide the model in such shares only
        structure = tuple(chains_of(candidate.placement))
        priced_s = inf if candidate.cost.missing_bytes > 0 else candidate.step_time_s
        prices_s.setdefault(image(structure), (structure, priced_s))
    for structure, _ in list(prices_s.values()):
        moved = side_by_side(board.problem, structure, shape)
        prices_s.setdefault(image(moved), (moved, inf))
    ranked: list[tuple[tuple[float, float, float], Hashable, Completion]] = []
    alike: set[tuple[float, float]] = set()
    for key, (structure, priced_s) in prices_s.items():
        found = complete(structure)
        if found is None:
            continue
        with_tail_s = found.quick_s + tails.estimate_s(found)
        if (found.quick_s, with_tail_s) not in alike:  # else sites or nodes are exchanged
            alike.add((found.quick_s, with_tail_s))
            ranked.append(((priced_s, found.quick_s, with_tail_s), key, found))
    orders = [
        sorted(ranked, key=lambda entry: entry[0][0]),
        sorted(ranked, key=lambda entry: entry[0][1]),
        sorted(ranked, key=lambda entry: entry[0][2]),
    ]
    chosen: dict[Hashable, Completion] = {}
    for entries in zip(*orders, strict=True):
        for _, key, found in entries:
            if len(chosen) < most:
                chosen.setdefault(key, found)
    return chosen
