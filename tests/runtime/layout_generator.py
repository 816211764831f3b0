"""Random layouts of given features: widths, depths, shares, context parallelism and how the batch
is divided."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product

from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape

GLOBAL_BATCH_SIZE = 6
MAX_PROCESSES = 8


def random_layout(rng: random.Random, values: Mapping[str, str], num_layers: int) -> Layout | None:
    """A layout of these values on `MAX_PROCESSES` at most; None if this draw gives none."""
    layout = _layout_of_tensor_groups(rng, values, num_layers)
    if layout is not None and values["context parallel"] == "on":
        layout = _with_context_parallel(rng, layout)
    return None if layout is None or layout.num_devices > MAX_PROCESSES else layout


def _with_context_parallel(rng: random.Random, layout: Layout) -> Layout:
    """Some stages, one at least, on two or three tensor-parallel groups."""
    stages = [
        (r, s) for r, replica in enumerate(layout.replicas) for s in range(len(replica.stages))
    ]
    chosen = {rng.choice(stages)} | {place for place in stages if rng.random() < 0.2}
    # Three groups hold eight tokens each, which some widths do not divide.
    sizes = {
        place: 3
        if layout.replicas[place[0]].stages[place[1]].tensor_parallel != 3 and rng.random() < 0.2
        else 2
        for place in sorted(chosen)
    }
    return Layout(
        tuple(
            replace(
                replica,
                stages=tuple(
                    replace(
                        stage,
                        context_parallel=sizes.get((r, s), 1),
                        context_shares=_context_shares(stage, sizes.get((r, s), 1)),
                    )
                    for s, stage in enumerate(replica.stages)
                ),
            )
            for r, replica in enumerate(layout.replicas)
        )
    )


def equal_contexts(layout: Layout) -> Layout:
    """The layout with sequences divided in equal parts."""
    return Layout(
        tuple(
            replace(r, stages=tuple(replace(s, context_shares=None) for s in r.stages))
            for r in layout.replicas
        )
    )


def _context_shares(stage: StageShape, size: int) -> tuple[int, ...] | None:
    """Unlike shares of sequences for every second stage that divides them."""
    if size == 1:
        return None
    # Drawn beside the generator: all else stays.
    aside = random.Random(f"{stage} {size}")
    if aside.random() < 0.5:
        return None
    return tuple(aside.randint(1, 4) for _ in range(size))


def _layout_of_tensor_groups(
    rng: random.Random, values: Mapping[str, str], num_layers: int
) -> Layout | None:
    num_replicas, deepest = int(values["replicas"]), int(values["stages"])
    depths = [deepest] * num_replicas
    if values["depths"] == "unlike":
        depths[1:] = [rng.randint(1, deepest) for _ in depths[1:]]
        if min(depths) == deepest:
            return None
        rng.shuffle(depths)
    widths = _widths(rng, values, depths)
    batches = _micro_batches(rng, values)
    if widths is None or batches is None:
        return None
    return Layout(
        tuple(
            ReplicaShape(
                tuple(
                    StageShape(width, layers, shares)
                    for (width, shares), layers in zip(
                        stages, random_parts(rng, num_layers, len(stages)), strict=True
                    )
                ),
                count,
                size,
            )
            for stages, (count, size) in zip(widths, batches, strict=True)
        )
    )


_Width = tuple[int, tuple[int, ...] | None]


def _widths(
    rng: random.Random, values: Mapping[str, str], depths: list[int]
) -> list[list[_Width]] | None:
    """[replica][stage] -> width and shares."""
    widest = int(values["widest"])
    widths = [[widest] * depth for depth in depths]
    if values["widths"] == "mixed":
        widths = [[rng.randint(1, widest) for _ in range(depth)] for depth in depths]
        flat = {width for stages in widths for width in stages}
        if widest not in flat or len(flat) == 1:
            return None
    uneven, fitting = values["shares"] == "uneven", values["sizes"] == "divide"
    found: list[list[_Width]] = [[(w, None) for w in stages] for stages in widths]
    wide = [(r, s) for r, ws in enumerate(widths) for s, width in enumerate(ws) if width > 1]
    if uneven:
        # Uneven groups beside even ones, where every width fits the model.
        some = rng.sample(wide, rng.randint(1, len(wide))) if fitting else wide
        for r, s in some:
            found[r][s] = (widths[r][s], _shares(rng, widths[r][s], must_differ=fitting))
    return found


def _shares(rng: random.Random, width: int, must_differ: bool) -> tuple[int, ...]:
    while True:
        shares = tuple(rng.randint(1, 4) for _ in range(width))
        if len(set(shares)) > 1 or not must_differ:
            return shares


def _micro_batches(
    rng: random.Random, values: Mapping[str, str]
) -> list[tuple[int, int | None]] | None:
    """[replica] -> (number of micro-batches, their size or None for the job's)."""
    own = values["micro-batch size"] == "of each replica"
    possible = _divisions(
        int(values["replicas"]),
        None if own else int(values["micro-batch size"]),
        values["micro-batches"] == "unlike",
    )
    if not possible:
        return None
    return [(count, size if own else None) for count, size in rng.choice(possible)]


@cache
def _divisions(
    num_replicas: int, size: int | None, unlike: bool
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """All ways to divide the batch: [way][replica] -> (count, size); sizes differ if None."""
    sizes = (1, 2, 3) if size is None else (size,)
    replica = [(count, s) for s in sizes for count in range(1, GLOBAL_BATCH_SIZE + 1)]
    return tuple(
        way
        for way in product(replica, repeat=num_replicas)
        if sum(count * s for count, s in way) == GLOBAL_BATCH_SIZE
        and (len({count for count, _ in way}) > 1) == unlike
        and (len({s for _, s in way}) > 1) == (size is None)
    )


def random_parts(rng: random.Random, total: int, num_parts: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), num_parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
