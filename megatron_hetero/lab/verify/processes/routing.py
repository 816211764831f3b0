"""Choices of experts of the one process, token by token, replayed on the plan.

In bf16 and fp16 the scores of two experts for a token may differ by less than rounding. The plan
rounds at other places, may choose the other expert, and then rightly trains something else. So the
one process's choices are kept (through `router_replay`, Megatron's own interface in its router).
The plan computes its own, counts the differences and measures the scores' distance, and continues
with the choices of the one process. A difference beyond rounding is an error of the plan.

A balancing loss counts the tokens of each expert by another choice, which Megatron does not replay
(`runtime.megatron.balance_choices`). It is kept and followed in the same way: one token counted for
another expert moves the gradient of a router by percents where a micro-batch has few tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.numpy import load_file

from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.batches import deal
from megatron_hetero.runtime.megatron import balance_choices
from megatron_hetero.runtime.parallel.context_place import ContextPlace

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Flips:
    """Tokens with a run's own choice unlike the followed choice.

    `margin` is the worst difference between the scores of the two, as a part of the token's largest
    score: a logit that was chosen last may itself be all but zero.
    """

    num_flipped: int = 0
    num_tokens: int = 0
    margin: float = 0.0

    def __add__(self, other: Flips) -> Flips:
        return Flips(
            self.num_flipped + other.num_flipped,
            self.num_tokens + other.num_tokens,
            max(self.margin, other.margin),
        )


@dataclass(frozen=True)
class Replay:
    """Choices of the one process, for a single rank.

    `record` is the archive of that process. `numbers` are its numbers of this rank's micro-batches
    in a step, of `per_step` in all, in the order in which the rank trains them. The rank has part
    `part` of the rows of its tokens in a micro-batch, which are at `positions` of sequences; empty
    where its stage has whole sequences.
    """

    record: Path
    numbers: tuple[int, ...]
    per_step: int
    part: int = 0
    positions: tuple[int, ...] = ()
    seq_length: int = 0

    def number(self, call: int) -> int:
        """Return the one process's number, over all steps, of this rank's micro-batch `call`."""
        step, place = divmod(call, len(self.numbers))
        return step * self.per_step + self.numbers[place]


def replay_of_rank(plan: Plan, rank: int, size: int, record: Path, seq_length: int) -> Replay:
    """Return the choices that a rank of a plan replays.

    Args:
        plan: the plan.
        rank: global rank.
        size: sequences of every micro-batch.
        record: safetensors file of the one process.
        seq_length: tokens of a sequence.
    """
    counts = [replica.num_micro_batches for replica in plan.replicas]
    # Micro-batches of this replica by their first sequence, hence by number.
    dealt = deal(counts, [size] * len(counts))
    place = rank_table(plan)[rank]
    numbers = tuple(batch.start // size for batch in dealt[place.replica])
    num_parts = plan.replicas[place.replica].stages[place.stage].shape.context_parallel
    positions: tuple[int, ...] = ()
    # Tokens of the sequence that this context-parallel rank has.
    if num_parts > 1:
        own = ContextPlace((seq_length // num_parts,) * num_parts, place.context_rank)
        positions = tuple(own.positions().tolist())
    return Replay(record, numbers, sum(counts), place.tensor_rank, positions, seq_length)


class Routers:
    """Recorder or replayer of the choices of a model's routers."""

    def __init__(self, replay: Replay | None = None) -> None:
        self._replay = replay
        self._seats: list[_Seat] = []
        self._latest: _Seat | None = None

    def attach(self, model: Sequence[torch.nn.Module]) -> None:
        """Attach to every router of the model."""
        from megatron.core.transformer.moe.router import TopKRouter

        archive = None if self._replay is None else load_file(self._replay.record)
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    number = int(module.layer_number)
                    given = None if archive is None else archive[_key(number)]
                    counted = None if archive is None else archive.get(_counted_key(number))
                    seat = _Seat(number, self._replay, given, counted, self._is_asked)
                    module.router_replay = seat
                    self._seats.append(seat)
        balance_choices.apply(self._count)

    def _is_asked(self, seat: _Seat) -> None:
        self._latest = seat

    def _count(self, choices: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return what a balancing loss counts, in the router that was asked for its choice last."""
        return choices if self._latest is None else self._latest.count(choices, scores)

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return the choices by layer, each of shape [micro-batch, token, choice], and the counted
        ones of balancing losses, of shape [micro-batch, token, expert]."""
        chosen = {_key(seat.layer_number): numpy.stack(seat.chosen) for seat in self._seats}
        counted = {
            _counted_key(seat.layer_number): numpy.stack(
                [choices for _, choices in sorted(seat.counts.items())]
            )
            for seat in self._seats
            if seat.counts
        }
        return chosen | counted

    def flips(self) -> Flips:
        """Sum the flips of all routers."""
        return sum((seat.flips for seat in self._seats), Flips())


def _key(layer_number: int) -> str:
    return f"choice/{layer_number}"


def _counted_key(layer_number: int) -> str:
    return f"counted/{layer_number}"


@dataclass
class _Seat:
    """Substitute for Megatron's `RouterReplay` of one router."""

    layer_number: int
    replay: Replay | None
    given: numpy.ndarray | None
    given_counts: numpy.ndarray | None = None
    when_asked: Callable[[_Seat], None] = lambda seat: None
    chosen: list[numpy.ndarray] = field(default_factory=list)
    counts: dict[int, numpy.ndarray] = field(default_factory=dict)
    flips: Flips = field(default_factory=Flips)
    _calls: int = 0
    _latest_call: int = 0
    _again: deque[int] = field(default_factory=deque)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts) of shape [token, choice], as Megatron's `RouterReplay` does."""
        if default_compute_topk is None:
            raise ValueError("a router asked for a replay without saying how it chooses")
        # The router's own choice, which decides unless there is one to follow.
        values, own = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        call, is_first = self._call()
        self._latest_call = call
        self.when_asked(self)
        if is_first:
            self.chosen.append(own.detach().cpu().numpy().astype(numpy.int16))
        if self.replay is None or self.given is None:
            return values, own
        rows = self._rows(self.given[self.replay.number(call)], len(scores), self.replay)
        due = torch.from_numpy(rows.astype(numpy.int64)).to(own)
        if is_first:
            self.flips = self.flips + _flips(scores.detach(), own, due)
        # Scores are the run's own; only the experts are the one process's.
        return scores.gather(1, due), due

    def count(self, choices: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the choices [token, expert] that a balancing loss counts: the followed ones.

        Megatron asks once for each micro-batch, in the pass with gradients.
        """
        self.counts[self._latest_call] = choices.detach().cpu().numpy().astype(numpy.uint8)
        if self.replay is None or self.given_counts is None:
            return choices
        whole = self.given_counts[self.replay.number(self._latest_call)]
        rows = self._rows(whole, len(choices), self.replay)
        due = torch.from_numpy(rows).to(choices)
        # Tokens are in the sum of flips already, but these scores may be further apart.
        topk = int(due.sum(dim=1).max())
        own, followed = (each.int().topk(topk, dim=1).indices for each in (choices, due))
        self.flips = self.flips + Flips(margin=_flips(scores.detach(), own, followed).margin)
        return due

    @staticmethod
    def _rows(whole: numpy.ndarray, count: int, replay: Replay) -> numpy.ndarray:
        """Return this rank's rows of a micro-batch's, of which it has `count`."""
        if replay.positions:
            # Rows are of tokens first, then of sequences.
            by_token = whole.reshape(replay.seq_length, -1, whole.shape[-1])
            whole = by_token[list(replay.positions)].reshape(-1, whole.shape[-1])
        part = replay.part if len(whole) > count else 0
        return whole[part * count : (part + 1) * count]

    def _call(self) -> tuple[int, bool]:
        """Return the micro-batch, and True if it comes for the first time.

        A recomputed layer runs without gradients first and once more, in the same order, in the
        backward pass.
        """
        if torch.is_grad_enabled() and self._again:
            return self._again.popleft(), False
        call = self._calls
        self._calls += 1
        if not torch.is_grad_enabled():
            self._again.append(call)
        return call, True


def _flips(scores: torch.Tensor, own: torch.Tensor, due: torch.Tensor) -> Flips:
    # [token]: another set of experts, in whatever order.
    differs = (own.sort(dim=1)[0] != due.sort(dim=1)[0]).any(dim=1)
    if not differs.any():
        return Flips(0, len(own), 0.0)
    # The weakest expert of each choice is the one that the other choice left out.
    least_own = scores.gather(1, own)[differs].float().amin(dim=1)
    least_due = scores.gather(1, due)[differs].float().amin(dim=1)
    largest = scores[differs].float().abs().amax(dim=1).clamp_min(1e-30)
    margin = ((least_own - least_due).abs() / largest).max()
    return Flips(int(differs.sum()), len(own), float(margin))
