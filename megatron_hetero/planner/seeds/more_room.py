"""A structure with room for all layers, found move by move from a structure that lacks memory.

What holds a model may need wide groups where the embedding and the head are, and narrow ones
elsewhere: no grid has them, and single choices one after the other seldom lead there.
"""

from __future__ import annotations

from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.neighbours import neighbours
from megatron_hetero.planner.units import Structure, chains_of


class MoreRoom:
    """Steepest descent from the structure of the board that came closest, all stages as the job's
    flags say."""

    name = "more-room"

    def __init__(self, max_work: int) -> None:
        self.max_work = max_work
        """Limit in structures looked at."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        # Only where nothing has fitted so far.
        start = board.out_of_memory.nearest
        if board.nearest is not None or start is None or not board.problem.costs.has_variants:
            return
        completer = Completer(board.problem)
        structure = tuple(chains_of(start.placement))
        missing, work, improved = missing_room(completer, structure), 0, True
        while any(missing) and improved:
            improved = False
            # First improvement, by stages without room first and missing layers second.
            for moved in neighbours(board.problem, structure, completer.shape):
                work += 1
                if work > self.max_work:
                    return
                less = missing_room(completer, moved)
                if less < missing:
                    structure, missing, improved = moved, less, True
                    break
        found = completer.complete(structure, completer.own_size, given=True)
        if found is not None:
            board.score(found.placement(completer.own_size), self.name)


def missing_room(completer: Completer, structure: Structure) -> tuple[int, int]:
    """Return how many stages have no room for a layer, and for how many layers of all replicas
    there is none."""
    num_layers = completer.problem.num_layers
    rooms = completer.rooms(structure)
    without = sum(room == 0 for own in rooms for room in own)
    return without, sum(max(0, num_layers - sum(own)) for own in rooms)
