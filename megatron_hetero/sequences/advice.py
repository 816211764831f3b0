"""What flexible groups gain on a cluster for a distribution of lengths: simulated steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.sequences.cluster_groups import ClusterGroups
from megatron_hetero.sequences.deal.batch import deal_batch
from megatron_hetero.sequences.deal.dealt import Deal, check_lengths
from megatron_hetero.sequences.deal.static import static_deals
from megatron_hetero.sequences.lengths import Lengths

WORTH_IT = 1.02
"""Flexible groups are advised from this gain on."""


@dataclass(frozen=True)
class FixedDegree:
    """All groups of `size` ranks: the seconds of all steps together."""

    size: int
    seconds: float


@dataclass(frozen=True)
class SequencePlan:
    """Steps of drawn sequences: `batches[i]` are the lengths of step i, `deals[i]` its deal, on
    `groups` as training runs them.

    `fixed` are the degrees that hold the longest sequence of the file, the fastest first.
    `any_exchange_s` are the seconds of all steps if flexible groups, too, had rings.
    """

    lengths: Lengths
    groups: ClusterGroups
    batches: tuple[tuple[int, ...], ...]
    deals: tuple[Deal, ...]
    fixed: tuple[FixedDegree, ...]
    any_exchange_s: float

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps with flexible groups."""
        return sum(deal.seconds for deal in self.deals)

    @property
    def bound_s(self) -> float:
        """Return a lower bound of every deal of the micro-batches of these steps."""
        return sum(deal.bound_s for deal in self.deals)

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of all steps over their seconds."""
        return sum(map(sum, self.batches)) / self.seconds

    @property
    def gain(self) -> float | None:
        """Return how many times as long the best fixed degree takes; None where none holds all."""
        return self.fixed[0].seconds / self.seconds if self.fixed else None

    @property
    def is_worth_it(self) -> bool:
        """Return whether flexible groups are advised."""
        return self.gain is None or self.gain >= WORTH_IT


def plan_sequences(
    groups: ClusterGroups,
    any_exchange: ClusterGroups,
    lengths: Lengths,
    num_sequences: int,
    num_steps: int,
) -> SequencePlan:
    """Deal a few steps of sequences as a file has them, and with every fixed degree.

    Args:
        groups: of the job, as training runs them.
        any_exchange: the same with rings too, which a fixed degree has.
        lengths: the file.
        num_sequences: of each step.
        num_steps: drawn with seeds 0, 1, 2 ..
    Raises:
        InfeasiblePlanError: the longest sequence is longer than any group can hold.
    """
    # Without this check the longest sequence might first be drawn in training.
    tree = groups.tree
    check_lengths(tree, [lengths.longest], [f"the longest sequence of {lengths.source}"])
    batches = [lengths.batch(num_sequences, seed) for seed in range(num_steps)]
    deals = [deal_batch(tree, batch) for batch in batches]
    return SequencePlan(
        lengths,
        groups,
        tuple(map(tuple, batches)),
        tuple(deals),
        _fixed(any_exchange, batches, lengths.longest),
        sum(deal_batch(any_exchange.tree, batch).seconds for batch in batches),
    )


def _fixed(
    groups: ClusterGroups, batches: Sequence[Sequence[int]], longest: int
) -> tuple[FixedDegree, ...]:
    """Deal all steps with each degree whose groups all hold the longest sequence of the file."""
    # A degree that cannot hold the longest of the file is no choice, whatever the draws have.
    holding = set(static_deals(groups.tree, [longest]))
    steps = [static_deals(groups.tree, batch) for batch in batches]
    found = [
        FixedDegree(size, sum(step[size].seconds for step in steps))
        for size in sorted(holding)
        if all(size in step for step in steps)
    ]
    return tuple(sorted(found, key=lambda degree: (degree.seconds, degree.size)))
