"""Stock Megatron's interleaved stage in the terms of the simulator's engine.

`forward_backward_pipelining_with_interleaving` with `overlap_p2p_comm`, as `pretrain` runs it.  It
overlaps less than its name says.  In the warm-up and in the cool-down it waits for each send, and
for the next receive with it.  In the steady state receives are asked for one pass ahead; a forward
pass still waits for its send (`deallocate_pipeline_outputs` frees what is sent), a backward pass
for the send of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.schedule.orders.interleaved import num_launched_ahead
from megatron_hetero.schedule.parts import Pipeline
from megatron_hetero.schedule.programme import COMPUTE, Operation
from megatron_hetero.schedule.simulator.compile import (
    CompiledInstruction,
    CompiledSend,
    Messages,
    computation,
    mark_final,
)


def compile_overlapped(pipeline: Pipeline, stage: int) -> list[CompiledInstruction]:
    """Compile the programme of a stage up to its gradient exchange.

    `pipeline` has equal chunk counts on all stages, in groups of one micro-batch for each stage.
    """
    return _Overlapped(pipeline, stage).compiled()


class _Overlapped:
    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._messages = Messages(pipeline, stage)
        schedule = pipeline.schedule
        # Megatron's order of passes; its messages are compiled anew below.
        passes = [o for i in schedule.programmes[stage] for o in i if o.kind in COMPUTE]
        self._forwards = [o for o in passes if o.kind == "forward"]
        self._backwards = [o for o in passes if o.kind == "backward"]
        # Groups are as large as the pipeline, as Megatron's default.
        size = schedule.num_stages
        ahead = num_launched_ahead(size, stage, schedule.num_chunks(stage), size)
        self._num_ahead = min(ahead, len(self._forwards))
        self._made: list[CompiledInstruction] = []
        self._at: tuple[Operation, ...] = (self._forwards[0],)
        """The pass beside whose messages the programme is."""

    def compiled(self) -> list[CompiledInstruction]:
        self._warm_up()
        unsent = self._steady()
        self._cool_down()
        self._post(awaits=unsent)
        # `--align-grad-reduce`: all stages begin to exchange a chunk at the same time, about.
        mark_final(self._made, num_later=self._stage)
        return self._made

    def _warm_up(self) -> None:
        # The first input; then each send is waited for together with the next input.
        self._post(receives=self._input_of(0))
        for k in range(self._num_ahead):
            sent = self._compute(self._forwards[k])
            self._post(sends=sent, receives=self._input_of(k + 1), awaits=sent)
        # Only where a steady state follows is the first gradient asked for ahead.
        if self._num_ahead < len(self._forwards):
            self._post(asks=self._gradient_of(0))

    def _steady(self) -> list[CompiledSend]:
        """Compile the steady state; return the last backward pass's send, for which nothing has
        waited."""
        unsent: list[CompiledSend] = []
        for k, forward in enumerate(self._forwards[self._num_ahead :]):
            if k:
                # Inputs were asked for one pass before; here they are waited for.
                self._post(receives=self._input_of(k + self._num_ahead))
            sent = self._compute(forward)
            self._post(sends=sent, asks=self._input_of(k + self._num_ahead + 1), awaits=sent)
            # The gradient likewise; behind its pass comes the wait for the backward send before it.
            self._post(receives=self._gradient_of(k))
            sent = self._compute(self._backwards[k])
            self._post(sends=sent, asks=self._gradient_of(k + 1), awaits=unsent)
            unsent = sent
        return unsent

    def _cool_down(self) -> None:
        # Gradients that are left, each waited for with the send before it.
        first = len(self._forwards) - self._num_ahead
        self._post(receives=self._gradient_of(first))
        for k in range(first, len(self._backwards)):
            sent = self._compute(self._backwards[k])
            self._post(sends=sent, receives=self._gradient_of(k + 1), awaits=sent)

    def _compute(self, work: Operation) -> list[CompiledSend]:
        """Compile one pass; return what it has to send."""
        self._at = (work,)
        self._made.append(computation(self._pipeline, self._stage, work))
        send = self._messages.output_of(work)
        return [] if send is None else [send]

    def _input_of(self, index: int) -> list[int]:
        return self._received(self._forwards[index : index + 1])

    def _gradient_of(self, index: int) -> list[int]:
        return self._received(self._backwards[index : index + 1])

    def _received(self, works: Sequence[Operation]) -> list[int]:
        keys = [self._messages.input_of(work) for work in works]
        return [key for key in keys if key is not None]

    def _post(
        self,
        sends: Sequence[CompiledSend] = (),
        receives: Sequence[int] = (),
        asks: Sequence[int] = (),
        awaits: Sequence[CompiledSend] = (),
    ) -> None:
        # The ends of the pipeline have passes without messages beside them.
        if sends or receives or asks or awaits:
            self._made.append(
                CompiledInstruction(
                    self._at,
                    sends=tuple(sends),
                    receives=tuple(receives),
                    asks=tuple(asks),
                    awaits=tuple([send.key for send in awaits]),
                )
            )
