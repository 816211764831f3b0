"""Exchanges made for a tree of links: at everything that joins branches, how these reduce.

After GenTree (arXiv 2409.04202): bottom-up, the children of each branch reduce among each other, in
stages of a fan-in each, or all at once; each range of the buffer leaves a branch once.  Which
stages is decided by the price of the whole plan, for all branches of a depth together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_hetero.exchange.groups.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose
from megatron_hetero.exchange.shares import balanced_shares
from tools.referees.gentree.baselines import baselines
from tools.referees.gentree.capacities import Capacities
from tools.referees.gentree.price import ExchangeLoads, ExchangePrice
from tools.referees.gentree.tree import LinkTree

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of chunks that are tried."""
BUFFERS = 2.0
"""A holder may receive so many times the buffer in a round."""
_FAN_INS = (2, 3, 4, 8)
_EQUAL = 1e-9
_FINALISTS = 8
MARGIN = 0.05
"""What a plan of ours has to gain over the best that libraries have, which they run better."""


@dataclass(frozen=True)
class BranchReduction:
    """How the children of a branch reduce among each other.

    Attributes:
        fan_in: children that first reduce together, then groups of these, and so on; 0: all at
            once.
        num_senders: to one owner in a round; 0: all.
        is_balanced: they own parts by the bandwidth of their uplinks, not equal ones.
    """

    fan_in: int = 0
    num_senders: int = 0
    is_balanced: bool = False


@dataclass(frozen=True)
class Chosen:
    """A plan and its price, with the best of the others beside it."""

    plan: ExchangePlan
    price: ExchangePrice
    baseline: ExchangePlan
    baseline_price: ExchangePrice

    @property
    def gain(self) -> float:
        """Return how many times as long the best baseline takes."""
        if not self.price.total_s:
            return 1.0
        return self.baseline_price.total_s / self.price.total_s


class Generator:
    """Maker of plans for one tree and one buffer.

    Args:
        tree: of two holders or more.
        size: elements of the buffer.
        bytes_per_element: on the links.
        purpose: all-reduce, reduce-scatter or all-gather.
        owners: of the elements, where they are given (unequal shares of an optimizer's state).
        max_received: elements that a holder has room for in a round.
    """

    def __init__(
        self,
        tree: LinkTree,
        size: int,
        bytes_per_element: float,
        purpose: Purpose = "all_reduce",
        owners: Sequence[Owned] | None = None,
        max_received: float | None = None,
    ) -> None:
        self._tree = tree
        self._size, self._bytes = size, bytes_per_element
        self._purpose, self._owners = purpose, owners
        self._most = BUFFERS * size if max_received is None else max_received
        self._capacity = Capacities(tree).of_branch
        self._inner = dict(tree.inner())
        self._holder = {row: holder for holder, row in enumerate(map(max, tree.ancestors.tolist()))}

    def choose(self) -> Chosen:
        """Return the fastest plan, and the fastest that others have.  A plan of ours has to gain
        `MARGIN`; of equally fast ones that with fewer messages is chosen.

        Raises:
            ValueError: every plan needs more buffers than there are.
        """
        usual = self._usual()
        baseline, baseline_price = _fastest(self._finalists(usual))
        plan, price = baseline, baseline_price
        ours, ours_price = _fastest(self._finalists(self._generated()), (plan, price))
        if ours_price.total_s * (1 + MARGIN) < price.total_s or self._owners is not None:
            plan, price = ours, ours_price
        return Chosen(
            replace(plan, num_chunks=price.num_chunks),
            price,
            replace(baseline, num_chunks=baseline_price.num_chunks),
            baseline_price,
        )

    def _usual(self) -> list[ExchangePlan]:
        if self._owners is None:
            return list(baselines(self._size, self._tree, self._purpose))
        # The owners are given: every holder sends every other one its part.
        num = self._tree.num_holders
        plan = grouped_plan(
            "parameter servers", self._purpose, self._size, even(range(num)), self._owners
        )
        return [plan]

    def _finalists(self, plans: Sequence[ExchangePlan]) -> list[tuple[ExchangePlan, ExchangePrice]]:
        """Price the plans that are estimated best, with their numbers of chunks."""
        found: list[tuple[float, int, int]] = []
        loads: list[ExchangeLoads] = []
        for plan in plans:
            load = ExchangeLoads(plan, self._tree)
            best = load.num_chunks(self._bytes, CHUNKS, self._most)
            if best is not None:
                found.append((best[0], len(loads), best[1]))
                loads.append(load)
        if not found:
            return []
        found = sorted(found)[:_FINALISTS]
        priced = []
        for _, number, num_chunks in found:
            for chunks in sorted({num_chunks, max(1, num_chunks // 2)}):
                if loads[number].plan.most_received(chunks) <= self._most:
                    price = loads[number].price(self._bytes, chunks)
                    priced.append((loads[number].plan, price))
        return priced

    def _generated(self) -> list[ExchangePlan]:
        """Choose the reduction of each depth in turn, the deepest first, while the others stay.

        Returns:
            The plans met meanwhile, the best last.
        """
        depths = sorted({self._tree.depths[n] for n in self._inner}, reverse=True)
        is_unlike = any(
            len({self._capacity[child] for child in children}) > 1
            for children in self._inner.values()
        )
        starts = [BranchReduction()] + ([BranchReduction(is_balanced=True)] if is_unlike else [])
        seen: list[tuple[float, ExchangePlan]] = []
        for start in starts:
            best = dict.fromkeys(self._inner, start)
            seen.append(self._estimated(best))
            best_s = seen[-1][0]
            for depth in depths:
                at_depth = [n for n in self._inner if self._tree.depths[n] == depth]
                for reduction in self._reductions(at_depth, is_unlike):
                    tried = {**best, **dict.fromkeys(at_depth, reduction)}
                    seen.append(self._estimated(tried))
                    if seen[-1][0] < best_s:
                        best_s, best = seen[-1][0], tried
        seen.sort(key=lambda entry: entry[0])
        return [plan for seconds, plan in seen[:_FINALISTS] if seconds < inf]

    def _estimated(self, reductions: Mapping[int, BranchReduction]) -> tuple[float, ExchangePlan]:
        plan = self.plan(reductions)
        loads = ExchangeLoads(plan, self._tree)
        best = loads.num_chunks(self._bytes, CHUNKS, self._most)
        return (inf if best is None else best[0]), plan

    def _reductions(self, numbers: Sequence[int], is_unlike: bool) -> list[BranchReduction]:
        """List the reductions that some branches may all take."""
        most = max(len(self._inner[number]) for number in numbers)
        limits = {
            self._tree.incast[edge][0]
            for number in numbers
            for child in self._inner[number]
            for edge in (2 * child + 1,)
            if edge in self._tree.incast
        }
        found = [BranchReduction(fan_in) for fan_in in (0, *_FAN_INS) if fan_in < most]
        found += [
            BranchReduction(0, num) for num in sorted({1, *limits}) if limits and num < most - 1
        ]
        found += [BranchReduction(limit + 1) for limit in limits if limit + 1 not in _FAN_INS]
        if is_unlike:
            found += [replace(reduction, is_balanced=True) for reduction in found]
        return found

    def plan(self, reductions: Mapping[int, BranchReduction]) -> ExchangePlan:
        """Make the plan in which each of the tree's inner branches reduces in a given reduction."""
        group = self._group(0, reductions)
        return grouped_plan("tree", self._purpose, self._size, group, self._owners)

    def _group(self, number: int, reductions: Mapping[int, BranchReduction]) -> Grouping | int:
        if number not in self._inner:
            return self._holder[number]
        children = self._inner[number]
        members = [self._group(child, reductions) for child in children]
        if len(members) == 1:
            return members[0]
        reduction = reductions[number]
        capacities = [self._capacity[child] for child in children]
        shares = [1 / len(members)] * len(members)
        if reduction.is_balanced:
            shares = list(balanced_shares(capacities))
        parts = [
            _Part(member, share, capacity)
            for member, share, capacity in zip(members, shares, capacities, strict=True)
        ]
        while reduction.fan_in and len(parts) > reduction.fan_in:
            parts = _together(parts, reduction.fan_in)
        return _joined(parts, reduction.num_senders).member


@dataclass(frozen=True)
class _Part:
    """A member of a group, the part that it owns, and its bandwidth."""

    member: Grouping | int
    share: float
    capacity: float


def _joined(parts: Sequence[_Part], num_senders: int = 0) -> _Part:
    if len(parts) == 1:
        return parts[0]
    total = sum(part.share for part in parts)
    shares = [part.share / total if total else 1 / len(parts) for part in parts]
    group = Grouping(tuple(part.member for part in parts), tuple(shares), num_senders)
    return _Part(group, total, sum(part.capacity for part in parts))


def _together(parts: Sequence[_Part], fan_in: int) -> list[_Part]:
    """Make groups of at most `fan_in`, with the fast members dealt out to all of them."""
    num = -(-len(parts) // fan_in)
    if len({part.capacity for part in parts}) == 1:
        return [_joined(parts[i * len(parts) // num : (i + 1) * len(parts) // num])
                for i in range(num)]  # fmt: skip
    ordered = sorted(parts, key=lambda part: -part.capacity)
    return [_joined(ordered[i::num]) for i in range(num)]


def _fastest(
    priced: Sequence[tuple[ExchangePlan, ExchangePrice]],
    or_else: tuple[ExchangePlan, ExchangePrice] | None = None,
) -> tuple[ExchangePlan, ExchangePrice]:
    """Return the fastest; of equally fast ones that with fewer messages."""
    if not priced:
        if or_else is None:
            raise ValueError("no exchange keeps to the buffers")
        return or_else
    least_s = min(price.total_s for _, price in priced)
    equal = [entry for entry in priced if entry[1].total_s <= least_s * (1 + _EQUAL)]
    return min(equal, key=lambda entry: entry[0].num_messages * entry[1].num_chunks)
