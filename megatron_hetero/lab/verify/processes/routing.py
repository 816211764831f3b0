"""Choices of experts of the one process, token by token, replayed on the plan.

In bf16 and fp16 the scores of two experts for a token may differ by less than rounding. The plan
rounds at other places, may choose the other expert, and then rightly trains something else. So the
one process's choices are kept (through `router_replay`, Megatron's own interface in its router).
The plan computes its own, counts the differences and measures the scores' distance, and continues
with the choices of the one process. A difference beyond rounding is an error of the plan.
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
from megatron_hetero.runtime.parallel.context_place import ContextPlace

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Flips:
    """Tokens with a run's own choice unlike the followed choice.

    `margin` is the worst difference between the scores of the two, as a part of the greater.
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

    def attach(self, model: Sequence[torch.nn.Module]) -> None:
        """Attach to every router of the model."""
        from megatron.core.transformer.moe.router import TopKRouter

        archive = None if self._replay is None else load_file(self._replay.record)
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    number = int(module.layer_number)
                    given = None if archive is None else archive[_key(number)]
                    # Megatron's router asks this object where replay is switched on.
                    module.router_replay = _Seat(number, self._replay, given)
                    self._seats.append(module.router_replay)

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return the choices by layer, each of shape [micro-batch, token, choice]."""
        return {_key(seat.layer_number): numpy.stack(seat.chosen) for seat in self._seats}

    def flips(self) -> Flips:
        """Sum the flips of all routers."""
        return sum((seat.flips for seat in self._seats), Flips())


def _key(layer_number: int) -> str:
    return f"choice/{layer_number}"


@dataclass
class _Seat:
    """Substitute for Megatron's `RouterReplay` of one router."""

    layer_number: int
    replay: Replay | None
    given: numpy.ndarray | None
    chosen: list[numpy.ndarray] = field(default_factory=list)
    flips: Flips = field(default_factory=Flips)
    _calls: int = 0
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
        # A recomputed pass chooses again and is not counted again.
        if is_first:
            self.chosen.append(own.detach().cpu().numpy().astype(numpy.int16))
        if self.replay is None or self.given is None:
            return values, own
        whole = self.given[self.replay.number(call)]
        if self.replay.positions:
            # Rows are of tokens first, then of sequences.
            by_token = whole.reshape(self.replay.seq_length, -1, whole.shape[-1])
            whole = by_token[list(self.replay.positions)].reshape(-1, whole.shape[-1])
        # With sequence parallelism the router has one rank's part of the rows.
        part = self.replay.part if len(whole) > len(scores) else 0
        rows = whole[part * len(scores) : (part + 1) * len(scores)]
        due = torch.from_numpy(rows.astype(numpy.int64)).to(own)
        if is_first:
            self.flips = self.flips + _flips(scores.detach(), own, due)
        # Scores are the run's own; only the experts are the one process's.
        return scores.gather(1, due), due

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
    margin = ((least_own - least_due).abs() / least_own.abs().clamp_min(1e-30)).max()
    return Flips(int(differs.sum()), len(own), float(margin))
