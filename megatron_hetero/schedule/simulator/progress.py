"""How far a stage has come in a simulated step."""

from __future__ import annotations

from megatron_hetero.schedule.parts import OpSpan, StageId
from megatron_hetero.schedule.simulator.compile import CompiledInstruction


class SimulatedStage:
    """The progress of one stage."""

    __slots__ = (
        "computed_s",
        "id",
        "instructions",
        "is_blocked",
        "now_s",
        "operations",
        "posted",
        "sent_until_s",
    )

    def __init__(self, identity: StageId) -> None:
        self.id = identity
        self.instructions: list[CompiledInstruction] = []
        self.operations: list[OpSpan] = []
        self.now_s = 0.0
        self.computed_s = 0.0
        """When its last computation has ended."""
        self.posted = False
        """The sends of the current instruction have been posted."""
        self.sent_until_s = 0.0
        """When all that was sent has arrived; gradients are exchanged after that."""
        self.is_blocked = False
        """It waits for something that nobody has posted yet."""
