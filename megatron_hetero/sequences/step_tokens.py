"""A dealt step as ranks run it: which tokens of which sequences each rank has, as data and as text.

One rank deals and sends the text to all others.  It has every member's number of tokens, not only
the deal: these come out of floating-point prices, which unlike processors may round unlike.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.sequences.deal.dealt import Deal, DealtGroup
from megatron_hetero.sequences.price.modelled import ModelledPrice
from megatron_hetero.sequences.price.shares import whole_shares
from megatron_hetero.sequences.tree import GroupTree


@dataclass(frozen=True)
class GroupTokens:
    """Ranks `first` and following, as many as there are members, train `sequences` (numbers in the
    batch) together in about `seconds`; `tokens` is [sequence][member].

    `domains` are numbers of members that follow each other and exchange heads all to all; between
    them keys and values are gathered.  Without any, each member is alone in its domain.
    """

    first: int
    sequences: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    domains: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.tokens[0])

    @property
    def ranks(self) -> range:
        """Return the ranks of the members."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class StepTokens:
    """One step of a job: [micro-batch][group].  Ranks without a group wait for the next one."""

    micro_batches: tuple[tuple[GroupTokens, ...], ...]

    def of_rank(self, rank: int, num_stages: int = 1) -> list[GroupTokens | None]:
        """Return the groups of a rank in training order; None is a filling micro-batch, for a rank
        without work.

        Members of a group wait for each other in its forward and in its backward pass.  A pipeline
        has others between these, whose order depends on how many came before: where groups divide
        sequences, pipelines of equally many stages keep step only if none leaves a micro-batch out.
        Else each has its own from short to long, as `tree.step_seconds` has them.

        Args:
            rank: of the groups.
            num_stages: of the pipeline that stands for it.
        """
        found = [
            next((group for group in groups if rank in group.ranks), None)
            for groups in self.micro_batches
        ]
        divides = any(group.size > 1 for groups in self.micro_batches for group in groups)
        if num_stages > 1 and divides:
            return found
        own = [group for group in found if group is not None]
        if num_stages > 1:
            # `step_seconds` prices the micro-batches of a pipeline from short to long.
            own.sort(key=lambda group: group.seconds)
        return [*own] or [None]

    def busy_s(self, num_ranks: int) -> list[float]:
        """Return the predicted seconds of every rank."""
        found = [0.0] * num_ranks
        for groups in self.micro_batches:
            for group in groups:
                for rank in group.ranks:
                    found[rank] += group.seconds
        return found

    @property
    def sizes(self) -> str:
        """Write the groups of each micro-batch: "2x2 1x1; 4x1" are two of two ranks beside one of
        one, and then four of one."""
        counted = (Counter(group.size for group in groups) for groups in self.micro_batches)
        return "; ".join(
            " ".join(f"{count}x{size}" for size, count in sorted(sizes.items(), reverse=True))
            for sizes in counted
        )

    def text(self) -> str:
        """Write the step as JSON, which `read_step` reads."""
        return json.dumps(
            [
                [
                    [
                        g.first,
                        list(g.sequences),
                        [list(t) for t in g.tokens],
                        g.seconds,
                        list(g.domains),
                    ]
                    for g in m
                ]
                for m in self.micro_batches
            ]
        )


def step_tokens(tree: GroupTree, lengths: Sequence[int], deal: Deal) -> StepTokens:
    """Divide the sequences of a deal over the members of their groups, by the shares of the prices.

    Args:
        tree: the groups of the job, with modelled prices of what training runs.
        lengths: of the batch's sequences, in tokens.
        deal: of the batch.
    """
    return StepTokens(
        tuple(
            tuple(_tokens_of(tree, lengths, group) for group in micro_batch.groups)
            for micro_batch in deal.micro_batches
        )
    )


def _tokens_of(tree: GroupTree, lengths: Sequence[int], group: DealtGroup) -> GroupTokens:
    price = tree.kinds[group.kind].prices[group.price]
    if not isinstance(price, ModelledPrice) or not price.is_trained:
        raise PlanFormatError(
            f"ranks {group.first} to {group.stop - 1}: their price ({price.name}) does not say "
            "what each rank has of a sequence, or is none that training runs"
        )
    # [sequence] lengths of the group's sequences.
    own = np.array([float(lengths[k]) for k in group.sequences])
    # Shares come by domain; members of the domain divide them evenly.
    widths = tuple(domain.width for domain in price.domains)
    # The members of a domain are equal.
    shares, caps = (
        np.repeat(of / np.array(widths)[:, None], widths, axis=0)
        for of in (price.shares(own), price.caps(own))
    )
    tokens = tuple(
        whole_shares(
            [float(s) for s in shares[:, i]], lengths[k], [float(ceil(c)) for c in caps[:, i]]
        )
        for i, k in enumerate(group.sequences)
    )
    domains = widths if max(widths) > 1 else ()
    return GroupTokens(group.first, group.sequences, tokens, group.seconds, domains)


def read_step(text: str, lengths: Sequence[int], num_ranks: int) -> StepTokens:
    """Read the text of `StepTokens.text`, and check the step against the sequences of the batch.

    Args:
        text: as received.
        lengths: of the batch's sequences, in tokens.
        num_ranks: of the job.
    Raises:
        PlanFormatError: a sequence is missing or twice there, a rank is in two groups at a time or
            none of the job's, or tokens do not add up to a length; the message names it.
    """
    data: list[list[list[Any]]] = json.loads(text)
    step = StepTokens(
        tuple(
            tuple(
                GroupTokens(g[0], tuple(g[1]), tuple(map(tuple, g[2])), g[3], tuple(g[4]))
                for g in groups
            )
            for groups in data
        )
    )
    check_step(step, lengths, num_ranks)
    return step


def check_step(step: StepTokens, lengths: Sequence[int], num_ranks: int) -> None:
    """Refuse a step that does not match the sequences; see `read_step`.

    Args:
        step: as made or received.
        lengths: of the batch's sequences, in tokens.
        num_ranks: of the job.
    """
    seen = Counter(k for groups in step.micro_batches for g in groups for k in g.sequences)
    for k in sorted(seen.keys() | set(range(len(lengths)))):
        if not 0 <= k < len(lengths):
            raise PlanFormatError(f"a step has sequence {k} of a batch of {len(lengths)}")
        if seen[k] != 1:
            raise PlanFormatError(
                f"a step of {len(lengths)} sequences has number {k} {seen[k]} times; each is "
                "trained once"
            )
    for number, groups in enumerate(step.micro_batches):
        taken: set[int] = set()
        for group in groups:
            _check_group(group, lengths, f"micro-batch {number}, ranks from {group.first}")
            if taken & set(group.ranks) or group.ranks.stop > num_ranks or group.first < 0:
                raise PlanFormatError(
                    f"micro-batch {number}: ranks {group.first} to {group.ranks.stop - 1} are in "
                    f"two groups, or not among the {num_ranks} of the job"
                )
            taken |= set(group.ranks)


def _check_group(group: GroupTokens, lengths: Sequence[int], where: str) -> None:
    if not group.sequences or len(group.tokens) != len(group.sequences):
        raise PlanFormatError(
            f"{where}: {len(group.tokens)} divisions of {len(group.sequences)} sequences; a group "
            "has at least one, and each is divided"
        )
    if group.domains and (sum(group.domains) != group.size or min(group.domains) < 1):
        raise PlanFormatError(
            f"{where}: domains of {', '.join(map(str, group.domains))} members are not the "
            f"{group.size} of the group"
        )
    for k, tokens in zip(group.sequences, group.tokens, strict=True):
        if len(tokens) != group.size or sum(tokens) != lengths[k] or min(tokens) < 0:
            raise PlanFormatError(
                f"{where}: the members' tokens {', '.join(map(str, tokens))} of sequence {k} do "
                f"not add up to its {lengths[k]}"
            )
