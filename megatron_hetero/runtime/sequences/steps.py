"""The steps of a data set: its next documents, dealt to groups, and what of them a rank has.

Rank 0 deals and sends the result.  Every rank could deal alike only on equal processors: a deal
compares floating-point prices, and unlike GPUs are in unlike machines.  It deals the next step in a
thread while this one trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.errors import HeteroError, InfeasiblePlanError
from megatron_hetero.runtime.parallel.texts import broadcast_text
from megatron_hetero.runtime.sequences.documents import Tokens
from megatron_hetero.runtime.sequences.groups import GroupPlace
from megatron_hetero.runtime.sequences.own_batch import OwnBatch, filling_batch, own_batch
from megatron_hetero.sequences.deal.batch import NO_SEARCH_WAS_FASTER, deal_batch, greedy_deal
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens, read_step, step_tokens
from megatron_hetero.sequences.tree import GroupTree

_FAULT = "!"
"""First character of the text of a step without a deal; JSON never begins so."""


@dataclass(frozen=True)
class RankStep:
    """A step as run by a rank, and the whole step for the log.

    `note` says what was wrong with the search, where something was; only rank 0 knows.
    """

    whole: StepTokens
    num_sequences: int
    num_tokens: int
    batches: tuple[OwnBatch, ...]
    note: str = ""


Documents = Sequence[Mapping[str, Any]]
"""Each with `tokens`, shape [tokens], and `name`."""

Dealt = tuple[StepTokens, str]
"""A step, and what was wrong with the search."""


def dealt_tokens(tree: GroupTree, documents: Documents) -> Dealt:
    """Deal documents, and divide each over the members of a group; a failed search gives way to the
    greedy deal.

    Args:
        tree: the groups of the job.
        documents: with `tokens` and `name`.
    Returns:
        The step, and what was wrong with the search.
    Raises:
        InfeasiblePlanError: a document is longer than any group can hold.
    """
    lengths = [len(document["tokens"]) for document in documents]
    try:
        deal = deal_batch(tree, lengths, [document["name"] for document in documents])
        found = {m.reason for m in deal.micro_batches} - {"", NO_SEARCH_WAS_FASTER}
        note = "; ".join(f"dealt greedily in part, {reason}" for reason in sorted(found))
    except InfeasiblePlanError:
        raise
    except Exception as error:  # a solver's own, of any kind: the step can be dealt without it
        note = f"dealt greedily, the search failed: {type(error).__name__}: {error}"
        deal = greedy_deal(tree, lengths, note)
    return step_tokens(tree, lengths, deal), note


class DealtSteps:
    """Iterator of this rank's steps; all ranks ask for each step together."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        consumed: int,
        deal: Callable[[Documents], Dealt],
        place: GroupPlace,
        uncounted: int | None = None,
    ) -> None:
        """Prepare the steps from a document on.

        Args:
            dataset: of documents; sample i is the i-th that the job reads.
            batch_size: documents of a step.
            consumed: documents that were read before.
            deal: from documents to what ranks have of them; called on rank 0 alone.
            place: of this rank.
            uncounted: as in `own_batch`.
        """
        self._dataset, self._size, self._next = dataset, batch_size, consumed
        self._deal, self._place, self._uncounted = deal, place, uncounted
        self._ahead: Future[Dealt] | None = None
        self._thread = ThreadPoolExecutor(1, "deal") if dist.get_rank() == 0 else None

    def __iter__(self) -> DealtSteps:
        return self

    def __next__(self) -> RankStep:
        """Return the next step.  Collective.

        Raises:
            StopIteration: the data end before the step does.
            InfeasiblePlanError: rank 0 could not deal it; the message is the same on all ranks.
        """
        first, place = self._next, self._place
        if first + self._size > len(self._dataset):
            raise StopIteration
        # Rank 0 deals, and a fault of the deal reaches all ranks as a text as well.
        text, note = self._dealt_text(first) if dist.get_rank() == 0 else (None, "")
        text = broadcast_text(text)
        if text.startswith(_FAULT):
            raise InfeasiblePlanError(text.removeprefix(_FAULT))
        self._next += self._size
        # The next step is dealt while this one trains.
        if self._thread is not None and self._next + self._size <= len(self._dataset):
            self._ahead = self._thread.submit(self._dealt, self._next)
        # Every rank reads all documents of a step, and takes its part of each.
        documents = [self._dataset[first + k]["tokens"] for k in range(self._size)]
        lengths = [len(document) for document in documents]
        whole = read_step(text, lengths, place.num_replicas)
        groups = whole.of_rank(place.replica, place.num_stages)
        batches = tuple(self._own_batch(group, documents) for group in groups)
        return RankStep(whole, self._size, sum(lengths), batches, note)

    def _own_batch(self, group: GroupTokens | None, documents: Sequence[Tokens]) -> OwnBatch:
        """Return the micro-batch of a group; the filling one without."""
        device, place = torch.cuda.current_device(), self._place
        if group is None:
            alone = place.groups[place.replica, place.replica + 1]
            return filling_batch(alone, device, place.multiple)
        return own_batch(
            group,
            place.replica,
            [documents[k] for k in group.sequences],
            place.groups[group.first, group.ranks.stop],
            self._uncounted,
            device,
            place.multiple,
        )

    def _dealt(self, first: int) -> Dealt:
        return self._deal([self._dataset[first + k] for k in range(self._size)])

    def _dealt_text(self, first: int) -> tuple[str, str]:
        try:
            whole, note = self._dealt(first) if self._ahead is None else self._ahead.result()
        except HeteroError as error:
            return f"{_FAULT}{error}", ""
        return whole.text(), note
