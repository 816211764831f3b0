"""References for deals of one micro-batch: brute force, and the programme of the FlexSP paper."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from megatron_hetero.sequences.deal.price_table import PriceTable
from megatron_hetero.sequences.price.group_price import Floats
from megatron_hetero.sequences.tree import GroupTree, make_tree
from tools.nests import halved


@dataclass(frozen=True)
class LinearPrice:
    """Any price that is a sum over sequences: `square` s^2 + `line` s, and one row of memory."""

    size: int
    fixed_s: float
    square: float
    line: float
    most: float
    name: str = "made up"

    @property
    def room(self) -> tuple[float]:
        return (self.most,)

    def seconds(self, lengths: Floats) -> Floats:
        return np.asarray((self.square * lengths + self.line) * lengths)

    def memory(self, lengths: Floats) -> Floats:
        return np.asarray(lengths / self.size)[None, :]


def random_tree(chance: random.Random, num_ranks: int, unlike: bool) -> GroupTree:
    """Groups of 1, 2, 4 .. ranks; with `unlike` the second half of the ranks is slower and has
    another memory."""
    square, line = chance.uniform(0.0, 2e-3), chance.uniform(0.2, 1.0)
    fixed, travel = chance.uniform(0, 20), chance.uniform(0, 0.3)
    slow, less = (chance.uniform(1, 3), chance.uniform(0.5, 1.0)) if unlike else (1.0, 1.0)
    most = chance.uniform(120, 400)

    def prices_of(ranks: tuple[int, ...]) -> tuple[object, tuple[LinearPrice, ...]]:
        size = len(ranks)
        slower = [slow if unlike and r >= num_ranks // 2 else 1.0 for r in ranks]
        speed = sum(1 / s for s in slower)
        mine = min(most * (less if s > 1 else 1.0) for s in slower)
        away = travel * (size > 1) * (1 + 0.2 * size)
        price = LinearPrice(size, fixed, square / speed, line / speed + away / size, mine)
        return (size, speed, mine), (price,)

    return make_tree(halved(range(num_ranks)), prices_of)


def choices(tree: GroupTree) -> Iterator[tuple[int, ...]]:
    """Every set of groups that are apart, as numbers of groups."""
    for count in range(1, tree.num_ranks + 1):
        for chosen in combinations(range(len(tree.groups)), count):
            spans = sorted((tree.groups[g].first, tree.groups[g].stop) for g in chosen)
            if all(a[1] <= b[0] for a, b in pairwise(spans)):
                yield chosen


def brute_force(table: PriceTable) -> float:
    """The least seconds of all deals, by trying every one; infinite where none fits."""
    tree, num = table.tree, len(table.lengths)
    best = float("inf")
    seen: set[tuple[int, ...]] = set()
    for chosen in choices(tree):
        kinds = tuple(sorted(tree.groups[g].kind for g in chosen))
        if kinds in seen:
            continue
        seen.add(kinds)
        options = [int(np.flatnonzero(table.kind_of_option == kind)[0]) for kind in kinds]
        grid = np.indices((len(options),) * num).reshape(num, -1)
        time, full = np.zeros(grid.shape[1]), np.zeros(grid.shape[1], dtype=bool)
        for g, option in enumerate(options):
            mine = grid == g
            with np.errstate(invalid="ignore"):
                own = np.where(mine, table.seconds[option][:, None], 0.0).sum(axis=0)
            time = np.maximum(time, own + table.fixed_s[option] * mine.any(axis=0))
            rows = table.rows[option]
            used = table.memory[rows] @ mine
            full |= (used > table.room[rows][:, None] * (1 + 1e-9)).any(axis=0)
        best = min(best, float(np.where(full, np.inf, time).min()))
    return best


def paper_programme(table: PriceTable) -> float:
    """The optimum of the paper's mixed-integer programme (arXiv 2412.01523, equations 12 to 19).

    Virtual groups p are all groups of the tree; m_p says whether p is used, A_kp whether it takes
    sequence k.  On equal ranks the paper counts degrees; here groups of one rank exclude each
    other, which is the same for aligned groups and holds for unlike ones.
    """
    tree, num = table.tree, len(table.lengths)
    num_groups = len(tree.groups)
    used, taken = 1, 1 + num_groups
    width = taken + num * num_groups
    rows: list[tuple[Floats, float, float]] = []

    def row(entries: dict[int, float], low: float, high: float) -> None:
        values = np.zeros(width)
        for column, value in entries.items():
            values[column] = value
        rows.append((values, low, high))

    upper = np.r_[np.inf, np.ones(width - 1)]
    for p, group in enumerate(tree.groups):
        option = int(np.flatnonzero(table.kind_of_option == group.kind)[0])
        columns = [taken + p * num + k for k in range(num)]
        seconds = np.where(np.isfinite(table.seconds[option]), table.seconds[option], 0.0)
        time = dict(zip(columns, seconds, strict=True))
        row({0: -1.0, used + p: float(table.fixed_s[option]), **time}, -np.inf, 0.0)
        for need, room in zip(table.memory[table.rows[option]], table.room[table.rows[option]],
                              strict=True):  # fmt: skip
            row({**dict(zip(columns, need, strict=True)), used + p: -float(room)}, -np.inf, 0.0)
        row({**dict.fromkeys(columns, 1.0), used + p: -float(num)}, -np.inf, 0.0)
        for k, column in enumerate(columns):
            if not np.isfinite(table.seconds[option, k]):
                upper[column] = 0.0
    for k in range(num):
        row({taken + p * num + k: 1.0 for p in range(num_groups)}, 1.0, 1.0)
    for rank in range(tree.num_ranks):
        held = {used + p: 1.0 for p, g in enumerate(tree.groups) if g.first <= rank < g.stop}
        row(held, -np.inf, 1.0)
    cost = np.zeros(width)
    cost[0] = 1.0
    matrix, low, high = (np.array(part) for part in zip(*rows, strict=True))
    found = milp(
        cost,
        integrality=np.r_[0, np.ones(width - 1)],
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    return float(found.fun) if found.status == 0 else float("inf")
