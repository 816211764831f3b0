"""A placement that a search has priced, and how candidates are ranked."""

from __future__ import annotations

from functools import cached_property, lru_cache, total_ordering

from megatron_hetero.cost.placement import NO_SETTINGS, Placement, StageSettings
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.hashed import value
from megatron_hetero.plan.stock_ranks import RankOrder
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.planner.evaluate.canonical import is_symmetric
from megatron_hetero.planner.objective import KEEPS_LIMITS, Standing
from megatron_hetero.rounding import ranked

PLUGIN_GAIN = 0.02
"""Part of the step to be gained by a plan that needs the plug-in only for sharded layers, for
experts dealt out unequally, or for an exchange by groups of machines."""
NEAR = 1.02
"""Steps up to so many times the best may be the best after all: priced more exactly, with queues or
with more forwards ahead."""
NUM_NEAR = 6
"""Plans after the best, tried with choices that the search leaves out: orders, an exchange by
groups. Such a plan may then come first."""
NUM_TAKEN = 16
"""Candidates that are taken over from the board of a part of the problem."""
NUM_KEPT = 64
"""Candidates that a ranking keeps."""
LOW_CONTENTION = 0.5
"""Contention up to which placements rank before placements with more contention."""


@value(frozen=True)
class Candidate:
    """A priced placement and the strategy that found the placement."""

    placement: Placement
    cost: PlacementCost
    strategy: str
    rank_order: RankOrder | None = None
    """Megatron's order of ranks, by which the replicas are arranged for stock Megatron; None if
    stock Megatron cannot run the placement."""
    standing: Standing = KEEPS_LIMITS
    """The candidate's rank by the problem's objective and limits."""

    @property
    def keeps_limits(self) -> bool:
        """Return whether the candidate is fast and cheap enough."""
        return self.standing.excess == 0.0

    @property
    def is_stock(self) -> bool:
        """Return whether stock Megatron can run the candidate, without the plug-in."""
        return self.rank_order is not None

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self.cost.step_time_s

    @property
    def has_counts(self) -> bool:
        """Return whether some replica has launch counts, in place of 1F1B's."""
        return any(r.launch_counts is not None for r in self.placement.replicas)

    @property
    def contention(self) -> float:
        """Part of the pipelines' time for which the busiest path between two nodes is taken: its
        messages wait for each other, which the quick price leaves out
        (`schedule.simulator.shared_paths`)."""
        return self.cost.card_s / max(r.pipeline_s for r in self.cost.replicas)

    @property
    def structure(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """Node, width and number of groups of every stage: what is left without layers and
        micro-batches."""
        return tuple(
            tuple((s.devices[0].node, s.width, s.context_parallel) for s in r.stages)
            for r in self.placement.replicas
        )

    @property
    def pattern(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """`structure` with nodes numbered as they come: equal for placements, of equal times, in
        which like nodes are exchanged as a whole."""
        numbers: dict[str, int] = {}
        return tuple(
            tuple(
                (numbers.setdefault(node, len(numbers)), width, groups)
                for node, width, groups in replica
            )
            for replica in self.structure
        )

    @cached_property
    def coarse_key(self) -> tuple[Standing, float]:
        """Return what `key` compares first, without the digits that rounding leaves; quick."""
        standing = Standing(ranked(self.standing.excess), ranked(self.standing.value))
        return standing, ranked(ranked_time_s(self.placement, self.cost))

    @cached_property
    def key(self) -> tuple[Standing, float, int, bool, _ByContent]:
        """Total order: nearer to the limits, better by the objective, faster, then fewer GPUs, then
        without the plug-in, then by layers and the like, then by devices (never by chance)."""
        num_gpus = sum([len(s.devices) for r in self.placement.replicas for s in r.stages])
        return (*self.coarse_key, num_gpus, not self.is_stock, _ByContent(self.placement))


@total_ordering
class _ByContent:
    """A placement in an order by its content. Only placements that are equally good are compared
    by it, so that it is written down where it is asked for: of thousands of stages it is long."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @cached_property
    def words(self) -> tuple[object, ...]:
        """All that tells the placement from others. Layers come first so that names of nodes decide
        last."""
        shape = tuple(
            # All that tells two placements apart, so that their order never depends on chance.
            (
                r.num_micro_batches,
                _shared(tuple([s.num_layers for s in r.stages])),
                r.launch_counts or (),
                r.micro_batch_size or 0,
                _written(tuple([s.own_settings for s in r.stages])),
                _shared(tuple([(s.context_parallel, s.context_shares or ()) for s in r.stages])),
                _shared(tuple([s.num_sharded_layers for s in r.stages])),
                _shared(tuple([s.expert_groups or () for s in r.stages])),
            )
            for r in self.placement.replicas
        )
        devices, dispatcher = tuple(self.placement.devices()), self.placement.dispatcher or ""
        return tuple(sorted(shape)), devices, shape, dispatcher

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByContent) and self.words == other.words

    def __lt__(self, other: _ByContent) -> bool:
        return self.words < other.words


@lru_cache(maxsize=4096)
def _shared[Words: tuple[object, ...]](words: Words) -> Words:
    """Return one object for equal parts of keys: thousands of replicas have few unlike ones."""
    return words


@lru_cache(maxsize=4096)
def _written(settings: tuple[StageSettings, ...]) -> str:
    """Write settings down: some are None, which has no order."""
    return repr(settings)


def ranked_time_s(placement: Placement, cost: PlacementCost) -> float:
    """Return the step time that the ranking counts: what the job's flags do not say must make up
    for `MIN_GAIN`, what alone takes the plug-in for `PLUGIN_GAIN`."""
    if is_plain(placement):
        return cost.step_time_s
    # Tables of experts in unlike numbers are what stock Megatron cannot say.
    tables = {stage.expert_shares for r in placement.replicas for stage in r.stages}
    deals_unlike = len(tables) > 1 or any(len(set(table or ())) > 1 for table in tables)
    if placement.has_sharded_layers or (deals_unlike and is_symmetric(placement)):
        return cost.step_time_s / (1 - PLUGIN_GAIN)
    return cost.step_time_s / (1 - MIN_GAIN)


def is_plain(placement: Placement) -> bool:
    """Return whether the placement follows the job's flags throughout: no launch counts,
    micro-batch sizes, recompute, shares, dealt-out experts or sharded layers beside the flags."""
    counts = (replica.launch_counts for replica in placement.replicas)
    return has_the_jobs_settings(placement) and all(own is None for own in counts)


def has_the_jobs_settings(placement: Placement) -> bool:
    """`is_plain`, whatever the launch counts."""
    for replica in placement.replicas:
        if replica.micro_batch_size is not None:
            return False
        for stage in replica.stages:
            if stage.own_settings != NO_SETTINGS or stage.context_parallel > 1:
                return False
            if stage.sharding is not None or stage.experts is not None:
                return False
    return True
