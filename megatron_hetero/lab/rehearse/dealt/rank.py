"""One rank of a rehearsal of dealt steps: the training of `runtime.sequences`, stretched.

The deal is that of the real job: documents have their real lengths, and rank 0 deals them by the
real prices while the step before runs.  Only then every share of a sequence is cut to a part of its
tokens, for the small model.  A pass takes what the prices say, messages between stages what the
described links do.  What members of a group send each other is in the price of its passes, which
begin together; the exchange of gradients is not stretched, and not in the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_hetero.lab.rehearse.clock import Clock, now
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.network import Network
from megatron_hetero.lab.rehearse.links.transport import Transport
from megatron_hetero.lab.rehearse.pace import StepPace
from megatron_hetero.lab.rehearse.progress import StepProgress
from megatron_hetero.plan.ranks import Position
from megatron_hetero.schedule.programme import COMPUTE
from megatron_hetero.sequences.replica_groups import ReplicaGroups
from megatron_hetero.sequences.simulated_step import SimulatedStep
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens


@dataclass(frozen=True)
class SmallTokens:
    """A token of the small model for `divisor` of a share, at least a single token; the activation
    stands for `token_bytes` times the own bytes."""

    divisor: int
    token_bytes: float

    def group(self, group: GroupTokens) -> GroupTokens:
        """Return a group with as few tokens as the small model trains."""
        # Rounded up: a member with tokens keeps at least one.
        tokens = tuple(tuple(-(-own // self.divisor) for own in of) for of in group.tokens)
        return replace(group, tokens=tokens)


@dataclass
class _DealtTimes:
    """A dealt step as the choice of a time scale sees it: alike on all ranks."""

    busy_s: float = 0.0
    shortest_s: float = 0.0

    def follow(self, simulated_s: float, num_passes: int) -> None:
        """Take a step's length, and a typical pass of it: shorter ones may lag behind."""
        self.busy_s, self.shortest_s = simulated_s, simulated_s / max(num_passes, 1)


class DealtRank:
    """`Observer` of a process's training (`runtime.job.entry`) that stretches the training."""

    def __init__(
        self,
        rank: int,
        place: Position,
        groups: ReplicaGroups,
        small: SmallTokens,
        board: Board,
        network: Network,
        num_steps: int,
        time_scale: float | None,
        slower: float = 1.0,
        progress: StepProgress | None = None,
    ) -> None:
        """Prepare the hooks of a rank.

        Args:
            rank: global rank.
            place: of the rank in the plan.
            groups: of the real job.
            small: what the small model trains of it.
            board: memory that all ranks share.
            network: hops between ranks.
            num_steps: number of steps that are to count.
            time_scale: fixed time scale; None lets the ranks agree on one.
            slower: factor by which this rank computes longer than predicted.
            progress: progress to write, on one rank only.
        """
        # What is real (groups, pipeline), and what is small.
        self._place, self._groups, self._small, self._slower = place, groups, small, slower
        self._pipeline = groups.pipelines[place.replica]
        self.clock = Clock()
        self.transport = Transport(rank, board, network, self.clock, frozenset())
        self._times = _DealtTimes()
        self.pace = StepPace(self.transport, self._times, num_steps, time_scale, progress)
        self._own: list[GroupTokens | None] = []
        self._num_small: list[int] = []
        self._noted: dict[str, Any] = {}

    # What `entry` calls.

    def observe_log(self) -> None:
        """Ignore the log."""

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Leave the model as it is."""
        return model

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the data as they are."""
        return provider

    # Hooks.

    def install(self) -> None:
        """Put all hooks in their places, in this process."""
        from megatron_hetero.runtime.job import flexible_sequences
        from megatron_hetero.runtime.parallel.pipeline import always_send_parts
        from megatron_hetero.runtime.sequences import schedule, steps
        from megatron_hetero.runtime.steps.executed_step import ExecutedStep

        # In the runtime: parts of activations, messages over the described
        # links, the real job's groups.
        always_send_parts()
        self.transport.install_messages()
        flexible_sequences.groups_of = lambda arguments, plan: self._groups
        # Tokens are cut after the deal, steps and operations are stretched.
        steps.own_batch = self._cutting(steps.own_batch)
        dealt = schedule.DealtSchedule
        dealt.__call__ = self._stepping(dealt.__call__)  # type: ignore[method-assign]
        ExecutedStep.run = self._ending(ExecutedStep.run)  # type: ignore[method-assign]
        ExecutedStep.do = self._operating(ExecutedStep.do)  # type: ignore[method-assign]

    def _cutting(self, own_batch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the choice of a rank's tokens: of each sequence only the first ones are left."""

        def held(group: GroupTokens, rank: int, documents: Sequence[Any], *given: Any) -> Any:
            # A document keeps its first tokens, as many as its small shares have together.
            small = self._small.group(group)
            cut = [d[: sum(t)] for d, t in zip(documents, small.tokens, strict=True)]
            return own_batch(small, rank, cut, *given)

        return held

    def _stepping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step: its time begins once its documents are read, on all ranks at once."""

        def held(dealt: Any, **named: Any) -> Any:
            # The deal arrives with the data; it is read here and handed on as it came.
            step = next(named["data_iterator"])
            self._follow(step.whole)
            self._num_small = [batch.tokens.numel() for batch in step.batches]
            self._noted |= {"num_sequences": step.num_sequences, "num_tokens": step.num_tokens}
            self.pace.begin()
            return call(dealt, **{**named, "data_iterator": iter([step])})

        return held

    def _follow(self, whole: StepTokens) -> None:
        pipelines = self._groups.pipelines
        # The deal of all replicas, of which this rank has its own micro-batches.
        self._own = whole.of_rank(self._place.replica, len(self._pipeline.stages))
        simulated_s = SimulatedStep(whole, pipelines).seconds
        # Every micro-batch is two passes, one in each direction.
        most = max(len(whole.of_rank(r, len(p.stages))) for r, p in enumerate(pipelines))
        self._times.follow(simulated_s, 2 * most)
        self._noted = {
            "predicted_s": simulated_s,
            "sizes": whole.sizes,
            "predicted_busy_s": whole.busy_s(len(pipelines)),
        }

    def _ending(self, run: Callable[..., None]) -> Callable[..., None]:
        """Wrap all passes of a step: its time ends with the last."""

        def held(step: Any, *given: Any) -> None:
            run(step, *given)
            self.pace.end(**self._noted)

        return held

    def _operating(self, do: Callable[..., None]) -> Callable[..., None]:
        """Wrap the operations of a step; each operation has a kind and a micro-batch."""

        def held(step: Any, operation: Any, forward: Any) -> None:
            number = operation.micro_batch
            group = self._own[number]
            # A message stands for the real activation of this micro-batch, not for a fixed ratio.
            self.transport.activation_ratio = self._real_tokens(number) * self._small.token_bytes
            if operation.kind not in COMPUTE:
                return do(step, operation, forward)
            begin_s, began = self.clock.time(), now()
            # The collectives of a pass end when its last member has begun it.
            key = self._key(operation.kind, number, group)
            self.transport.board.come(key, begin_s)
            do(step, operation, forward)
            self.clock.computed(
                operation.kind,
                number,
                0,
                self.transport.board.latest_s(key),
                began,
                self._seconds(operation.kind, group),
            )
            return None

        return held

    def _key(self, kind: str, number: int, group: GroupTokens | None) -> tuple[object, ...]:
        """Return a pass's name, equal on all ranks of the pass."""
        # Members of a group share a pass; a replica without tokens passes alone.
        which = (self._place.replica, number) if group is None else (group.first, *group.sequences)
        return "pass", self.pace.num_begun, kind, self._place.stage, group is None, which

    def _seconds(self, kind: str, group: GroupTokens | None) -> float:
        stage = self._place.stage
        # A price is of both passes; `forward_part` of it is the forward pass.
        part = self._pipeline.stages[stage].forward_part
        seconds = self._pipeline.seconds(stage, group) * self._slower
        return seconds * (part if kind == "forward" else 1 - part)

    def _real_tokens(self, number: int) -> float:
        """Return the real tokens of this replica in a micro-batch, over the small micro-batch's
        tokens."""
        group = self._own[number]
        if group is None:
            return 1.0
        # A group's tokens are [sequence][member]; the member is counted from
        # the group's first replica.
        own = sum(tokens[self._place.replica - group.first] for tokens in group.tokens)
        return own / self._num_small[number]
