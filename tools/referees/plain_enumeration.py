"""A plain enumeration under Sailor's prices, which nothing of our search takes part in: an anchor.

All replicas are alike, and a stage has one type and one width, each type one width everywhere: a
few stages of one type, some of another, and again of the first (V^i A^n V^j), for any two types in
both roles; and of three types one block of each, in any order.  Layers are divided so that the
slowest stage is as fast as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations, product
from math import ceil, inf

from tools.referees.sailor import (
    STATE_BYTES,
    Group,
    Sailor,
    capacity_bytes,
    fewest_micro_batches,
    fixed_bytes,
    pipelines_of,
)
from tools.referees.sailor_tables import ELEMENT_BYTES

ZONE = "us-central1-a"
MAX_WIDTH = 4


def best_iterations_per_s(
    model: str,
    sequences: int,
    gpus: Mapping[str, int],
    max_stages: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
) -> float:
    """Return steps a second of the best plan of the enumeration; 0 where none fits.

    Args:
        model: one of the tables' models.
        sequences: of one step.
        gpus: GPUs of each type, in nodes of 4 in one zone.
        max_stages: of a pipeline.
        micro_batch_sizes: all are tried.
    """
    best_s = inf
    for size in micro_batch_sizes:
        referee = Sailor(model, size)
        for stages in _stages(list(gpus), max_stages):
            types = list(dict.fromkeys(stages))
            for widths in product(*(referee.tables.widths(gpu) for gpu in types)):
                if any(width > MAX_WIDTH for width in widths):
                    continue
                width_of = dict(zip(types, widths, strict=True))
                chain = tuple(Group(ZONE, gpu, width_of[gpu], 4) for gpu in stages)
                used = {gpu: stages.count(gpu) * width for gpu, width in width_of.items()}
                most = min(gpus[gpu] // number for gpu, number in used.items())
                layers = minimax_layers(referee, chain) if most else None
                if layers is None:
                    continue
                for degree in _degrees(most, sequences, size):
                    pipelines = pipelines_of([(layers, chain)] * degree)
                    count = fewest_micro_batches(sequences, size, degree)
                    best_s = min(best_s, referee.step_s(pipelines, count))
    return 1 / best_s


def minimax_layers(referee: Sailor, chain: Sequence[Group]) -> tuple[int, ...] | None:
    """Layers of each stage such that the slowest is as fast as possible, by dynamic programming
    over the tables' entries with their memory; None where nothing fits."""
    tables = referee.tables
    num_entries, num_stages = tables.num_entries, len(chain)
    kept = tables.micro_batch_size * ELEMENT_BYTES
    best = [0.0] + [inf] * num_entries
    cuts: list[list[int]] = []
    for s, group in enumerate(chain):
        times_s = [e.forward_s + e.backward_s for e in tables.times(group.gpu, group.width)]
        room = capacity_bytes(group.gpu) - fixed_bytes(group.width)
        bytes_of = [
            STATE_BYTES * e.num_params + kept * (num_stages - s) * e.activation_floats
            for e in tables.memory(group.width)
        ]
        reached, cut = [inf] * (num_entries + 1), [0] * (num_entries + 1)
        for end in range(s + 1, num_entries - num_stages + s + 2):
            time_s, num_bytes = 0.0, 0
            for start in range(end - 1, s - 1, -1):
                time_s += times_s[start]
                num_bytes += bytes_of[start]
                if num_bytes > room or time_s >= reached[end]:
                    break
                if max(best[start], time_s) < reached[end]:
                    reached[end], cut[end] = max(best[start], time_s), start
        best = reached
        cuts.append(cut)
    if best[num_entries] == inf:
        return None
    ends = [num_entries]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    entries = [b - a for a, b in pairwise(ends)]
    entries[0] -= 1
    entries[-1] -= num_entries - 1 - tables.shape.num_layers
    return tuple(entries)


def _stages(types: Sequence[str], max_stages: int) -> Iterator[tuple[str, ...]]:
    """Yield the types of stages: one alone, V^i A^n V^j of any two, a block of each of three."""
    for num_stages in range(1, max_stages + 1):
        for gpu in types:
            yield (gpu,) * num_stages
        for inner, outer in permutations(types, 2):
            for n in range(1, num_stages):
                for i in range(num_stages - n + 1):
                    yield (outer,) * i + (inner,) * n + (outer,) * (num_stages - n - i)
        for first, middle, last in permutations(types, 3):
            for i, j in combinations(range(1, num_stages), 2):
                yield (first,) * i + (middle,) * (j - i) + (last,) * (num_stages - j)


def _degrees(most: int, sequences: int, size: int) -> set[int]:
    """The largest degree and some parts of it, each the smallest with the same micro-batches."""
    wanted = {most, *(max(1, most * part // 16) for part in range(6, 16))}
    return {
        ceil(sequences / (size * fewest_micro_batches(sequences, size, degree)))
        for degree in wanted
    }
