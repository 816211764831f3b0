"""Structures on a board to start a search from: those that promise most, by several measures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import inf

from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.evaluate.candidate import LOW_CONTENTION
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.tail import Tails
from megatron_hetero.planner.moves.like_groups import lengthwise
from megatron_hetero.planner.shapes.crowding import busiest_s
from megatron_hetero.planner.units import Chain, Unit, chains_of
from megatron_hetero.rounding import ranked


def promising(
    board: Scoreboard,
    tails: Tails,
    complete: Callable[[tuple[Chain, ...]], Completion | None],
    image: Callable[[tuple[Chain, ...]], Hashable],
    kind_of: Mapping[str, int],
    most: int,
) -> dict[Hashable, Completion]:
    """Return the best structures of a board in turn by price, by pipelines and exchange, and by
    both where messages seldom wait for each other. Included are structures that lack memory under
    the job's flags, and structures with waiting messages, laid out lengthwise.

    Args:
        complete: gives a structure its layers and settings; None where it does not fit.
        image: equal for structures in which like nodes are exchanged.
        kind_of: by node; groups of one kind and form are alike.  Empty: nothing is laid out
            otherwise.
        most: structures in all.

    Returns:
        The completed structures by their images.
    """
    # Structures of the board, with their price; without memory it is unknown.
    structures: dict[Hashable, tuple[tuple[Chain, ...], float]] = {}
    units: dict[Unit, Unit] = {}  # One object for each group, which remembers what it is asked.
    for candidate in (*board.ranking_of_all, *board.out_of_memory.fastest):
        structure = tuple(
            tuple([units.setdefault(unit, unit) for unit in chain])
            for chain in chains_of(candidate.placement)
        )
        priced_s = inf if candidate.cost.missing_bytes > 0 else candidate.step_time_s
        structures.setdefault(image(structure), (structure, priced_s))
    measured: list[tuple[tuple[float, float, float], Hashable, Completion]] = []
    alike: set[tuple[float, float]] = set()
    to_complete = list(structures.items())
    for key, (structure, priced_s) in to_complete:  # which grows by structures laid out otherwise
        # Complete each, and estimate its exchange.
        found = complete(structure)
        if found is None:
            continue
        quick_s = ranked(found.quick_s)
        with_tail_s = ranked(found.quick_s + tails.estimate_s(found))
        if (quick_s, with_tail_s) in alike:
            continue  # sites or nodes are exchanged
        alike.add((quick_s, with_tail_s))
        # Messages that wait for each other: not quiet; try the structure laid out lengthwise.
        on_paths_s = busiest_s(board.problem, structure, found.num_micro_batches)
        quiet_s = with_tail_s
        if on_paths_s > LOW_CONTENTION * found.quick_s:
            quiet_s = inf
        if quiet_s == inf and kind_of:
            laid = lengthwise(structure, kind_of), inf
            laid_key = image(laid[0])
            if structures.setdefault(laid_key, laid) is laid:
                to_complete.append((laid_key, laid))
        measured.append(((ranked(priced_s), quiet_s, with_tail_s), key, found))
    # Take from three orders in turn.
    orders = [
        sorted(measured, key=lambda entry: entry[0][0]),
        sorted(measured, key=lambda entry: entry[0][1]),
        sorted(measured, key=lambda entry: entry[0][2]),
    ]
    chosen: dict[Hashable, Completion] = {}
    for entries in zip(*orders, strict=True):
        for _, key, found in entries:
            if len(chosen) < most:
                chosen.setdefault(key, found)
    return chosen
