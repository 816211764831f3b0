"""When ranks are done with a dealt step, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.schedule.orders.one_f_one_b import stage_order
from megatron_hetero.schedule.programme import Operation
from megatron_hetero.sequences.pipelines import PipelineRates
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens


class _BusyStage:
    """One stage of a replica in a simulated step: what it does next, and until when it is busy."""

    def __init__(self, order: Sequence[Operation]) -> None:
        self.order, self.place, self.free_s = order, 0, 0.0

    @property
    def next(self) -> Operation | None:
        return self.order[self.place] if self.place < len(self.order) else None


class SimulatedStep:
    """A dealt step in time: every stage does its passes in 1F1B, and those of a group begin
    together.  The exchange of gradients is not in it."""

    def __init__(self, step: StepTokens, pipelines: Sequence[PipelineRates]) -> None:
        """Simulate.

        Args:
            step: as dealt.
            pipelines: of every rank of the groups; `pipelines.WHOLE` where it is a GPU.
        Raises:
            RuntimeError: stages would wait for each other for ever.
        """
        self._pipelines = pipelines
        self._own = [step.of_rank(r, len(p.stages)) for r, p in enumerate(pipelines)]
        self._stages = [
            [_BusyStage(stage_order(len(own), count)) for count in pipeline.launch_counts]
            for own, pipeline in zip(self._own, pipelines, strict=True)
        ]
        self._ends: dict[tuple[int, int, str, int], float] = {}
        # Stages advance in any order, because each pass waits for all that it needs.
        places = [(r, s) for r, stages in enumerate(self._stages) for s in range(len(stages))]
        moves = True
        while moves:
            moves = False
            for r, s in places:
                moves |= self._advance(r, s)
        if any(stage.next for stages in self._stages for stage in stages):
            raise RuntimeError("the stages of a dealt step wait for each other in a ring")
        self.seconds = max(stage.free_s for stages in self._stages for stage in stages)

    def _advance(self, replica: int, stage: int) -> bool:
        """Do the next pass of a stage, of all members of its group; tell if it could begin."""
        operation = self._stages[replica][stage].next
        if operation is None:
            return False
        group = self._own[replica][operation.micro_batch]
        members = [replica] if group is None else list(group.ranks)
        # All members begin together: attention of each needs the keys of all others.
        begins = [self._ready_s(r, stage, operation.kind, group) for r in members]
        if None in begins:
            return False
        begin_s = max(s for s in begins if s is not None)
        for r in members:
            self._do(r, stage, begin_s, group)
        return True

    def _ready_s(
        self, replica: int, stage: int, kind: str, group: GroupTokens | None
    ) -> float | None:
        """Return when a member could begin; None where it has not got so far."""
        own = self._stages[replica][stage]
        operation = own.next
        if operation is None or operation.kind != kind:
            return None
        k = operation.micro_batch
        if self._own[replica][k] != group:
            return None
        last = len(self._stages[replica]) - 1
        # Forward passes come from the stage before, backward passes from the stage behind.
        before = stage - 1 if kind == "forward" else stage + 1
        if not 0 <= before <= last:
            return own.free_s
        arrived_s = self._ends.get((replica, before, kind, k))
        if arrived_s is None:
            return None
        # The boundary belongs to the stage in front of it.
        hop = self._pipelines[replica].stages[min(stage, before)]
        # A member sends its own part of each sequence only.
        tokens = 0 if group is None else sum(t[replica - group.first] for t in group.tokens)
        return max(own.free_s, arrived_s + hop.crossing_s(tokens))

    def _do(self, replica: int, stage: int, begin_s: float, group: GroupTokens | None) -> None:
        own, pipeline = self._stages[replica][stage], self._pipelines[replica]
        operation = own.next
        if operation is None:
            return
        seconds = pipeline.seconds(stage, group)
        part = pipeline.stages[stage].forward_part
        own.free_s = begin_s + seconds * (part if operation.kind == "forward" else 1 - part)
        self._ends[replica, stage, operation.kind, operation.micro_batch] = own.free_s
        own.place += 1
