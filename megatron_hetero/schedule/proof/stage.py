"""Operations of a rank in a step of a stage's programme, in the runtime's order
(`runtime.steps.executed_step`)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.hashed import value
from megatron_hetero.schedule.orders.delivery import StagePosts
from megatron_hetero.schedule.programme import (
    RECEIVES,
    Instruction,
    Message,
    Operation,
    Schedule,
)
from megatron_hetero.schedule.proof.gradients import RankGradients
from megatron_hetero.schedule.proof.operations import RankItems


@value(frozen=True)
class BoundarySide:
    """One rank's side of a boundary: the communicators of each direction, in turn, and the ranks
    with which it exchanges pieces and shapes.  `shapes` is empty where no shapes are sent."""

    outward: Sequence[int]
    inward: Sequence[int]
    peers: Sequence[int]
    shapes: Sequence[int] = ()
    told: Sequence[int] = ()


@value(frozen=True)
class RankStage:
    """A stage in a replica's schedule, and the communicators of a rank of the stage.

    Attributes:
        schedule, stage: the replica's schedule, and the stage in it.
        posts: receives before each instruction.
        arrived: sends that are known to have arrived with a message to this stage.
        chunks: [chunk] -> its layers, first ones first, with what comes before and behind them.
        sharded: layers that are gathered for each pass.
        inner: communicators inside of the stage that a pass uses.
        divided: micro-batch -> the communicator of replicas that divide its sequences.
        tensor: that of the tensor-parallel group, if it has several ranks.
        sides: boundary -> this rank's side.
        in_sequence: ranks of a tensor-parallel group have parts of sequences between its products.
    """

    schedule: Schedule
    stage: int
    posts: StagePosts
    arrived: Mapping[Message, int]
    chunks: Sequence[Sequence[int]]
    sharded: frozenset[int]
    inner: Sequence[int]
    divided: Mapping[int, int]
    tensor: int | None
    sides: Mapping[int, BoundarySide]
    in_sequence: bool


class StageItems:
    """A step of a rank.

    Args:
        of: its stage.
        items: where to write.
        gradients: of the rank; None in validation.
        early: operations with which chunks may start to exchange gradients
            (`schedule.orders.early_gradients`).
        overlaps_gathers: the next sharded layer is gathered while one computes.
        num_idle_rounds: micro-batches that other replicas have and this one has not, in which it
            gives its parts of sharded layers.
    """

    def __init__(
        self,
        of: RankStage,
        items: RankItems,
        gradients: RankGradients,
        *,
        forward_only: bool = False,
        early: Mapping[Operation, Collection[int]] = MappingProxyType({}),
        overlaps_gathers: bool = False,
        num_idle_rounds: int = 0,
    ) -> None:
        self._of, self._items, self._gradients = of, items, gradients
        self._forward_only = forward_only
        self._early = early
        self._overlaps = overlaps_gathers
        self._num_idle_rounds = num_idle_rounds
        self._posted: dict[int, deque[int]] = {number: deque() for number in of.sides}
        self._sent: dict[int, list[tuple[int, ...]]] = {number: [] for number in of.sides}
        self._forgotten: Counter[int] = Counter()
        self._num_asked: Counter[int] = Counter()
        self._num_told: Counter[int] = Counter()
        self._left = {layer for chunk in of.chunks for layer in chunk}
        self._arriving: dict[int, list[int]] = {}
        self._giving: list[int] = []

    def run(self) -> None:
        """Write all items, up to the end of the programme."""
        # Validation runs the forward passes alone, with its own posts.
        of = self._of
        instructions: Sequence[Instruction] = of.schedule.programmes[of.stage]
        posts = of.posts.training
        if self._forward_only:
            instructions, posts = of.posts.forwards, of.posts.validation
        # Receives of each boundary, in order: posts name boundaries only.
        receives: dict[int, deque[Operation]] = {}
        for instruction in instructions:
            for operation in instruction:
                if operation.kind in RECEIVES:
                    boundary = of.schedule.boundary(of.stage, operation)
                    receives.setdefault(boundary, deque()).append(operation)
        # Post what is due, then run the instruction.
        for instruction, boundaries in zip(instructions, posts, strict=True):
            for boundary in boundaries:
                self._post(boundary, receives[boundary].popleft())
            for operation in instruction:
                self._do(operation)
        # After the programme: idle rounds, exchanges that have room, sends still held.
        self._idle()
        if not self._forward_only:
            self._gradients.start_complete(())
        for boundary, sent in self._sent.items():
            self._forget(boundary, len(sent))

    def _do(self, operation: Operation) -> None:
        layers = self._of.chunks[operation.chunk]
        started = self._early.get(operation, ())
        for chunk in started:
            # Chunks that are done, but for the operation's own.
            if chunk != operation.chunk:
                self._left.difference_update(self._of.chunks[chunk])
        if started:
            self._gradients.start_complete(self._left)
        match operation.kind:
            case "forward":
                self._pass(layers, operation)
            case "backward" | "backward_input":
                completes = operation.chunk in started
                self._pass(tuple(reversed(layers)), operation, completes=completes)
            case "backward_weight" if self._of.in_sequence and self._of.tensor is not None:
                # Its linear layers gather their input again.
                self._items.done(self._of.tensor, str(operation))
            case "send_forward" | "send_backward":
                self._send(operation)
            case "recv_forward" | "recv_backward":
                self._receive(operation)

    def _pass(
        self,
        layers: Sequence[int],
        operation: Operation,
        *,
        completes: bool = False,
    ) -> None:
        """Write a pass over layers: at once, where nothing else comes in between."""
        # Layers one by one only if gradients or sharded weights come in between.
        backward = operation.kind != "forward"
        what = f"{'backward' if backward else 'forward'} {operation.micro_batch}"
        if not completes and self._of.sharded.isdisjoint(layers):
            self._inner(what, operation.micro_batch)
            return
        for place, layer in enumerate(layers):
            following = layers[place + 1] if place + 1 < len(layers) else None
            if layer in self._of.sharded:
                self._arrive(layer)
                if self._overlaps and following in self._of.sharded:
                    self._ask(following)
            # The embedding's backward pass exchanges nothing unless it gathers sequences.
            if layer != EMBEDDING or not backward or self._of.in_sequence:
                self._inner(f"{what}, layer {layer}", operation.micro_batch)
            if layer in self._of.sharded and backward:
                self._give(layer, waits=not self._overlaps or following not in self._of.sharded)
            if completes:
                self._left.discard(layer)
                self._gradients.start_complete(self._left)

    def _inner(self, what: str, micro_batch: int) -> None:
        for group in self._of.inner:
            self._items.done(group, what)
        if micro_batch in self._of.divided:
            self._items.done(self._of.divided[micro_batch], what)

    def _ask(self, layer: int | None) -> None:
        # A layer that is on its way already is not asked for twice.
        if layer is not None and layer not in self._arriving:
            self._arriving[layer] = self._gradients.gather(layer)

    def _arrive(self, layer: int) -> None:
        self._ask(layer)
        for operation in self._arriving.pop(layer):
            self._items.wait(operation)

    def _give(self, layer: int, *, waits: bool) -> None:
        """Send a sharded layer's gradients; those of the layer before are added up first."""
        for operation in self._giving:
            self._items.wait(operation)
        self._giving = self._gradients.give(layer)
        if waits:
            for operation in self._giving:
                self._items.wait(operation)
            self._giving = []

    def _idle(self) -> None:
        # Rounds in which this replica has no micro-batch, but others need its parts.
        sharded = [n for chunk in self._of.chunks for n in chunk if n in self._of.sharded]
        for _ in range(self._num_idle_rounds if sharded else 0):
            self._idle_pass(sharded)
            if not self._forward_only:
                self._idle_pass(sharded[::-1], backward=True)

    def _idle_pass(self, layers: Sequence[int], *, backward: bool = False) -> None:
        for place, layer in enumerate(layers):
            following = layers[place + 1] if place + 1 < len(layers) else None
            self._arrive(layer)
            if self._overlaps:
                self._ask(following)
            if backward:
                self._give(layer, waits=not self._overlaps or following is None)

    def _post(self, boundary: int, operation: Operation) -> None:
        side = self._of.sides[boundary]
        # Of an activation of unknown size the shape comes first, on a communicator of its own.
        if side.shapes and operation.kind == "recv_forward":
            group = side.shapes[self._num_told[boundary] % len(side.shapes)]
            self._num_told[boundary] += 1
            told = [(peer, False) for peer in side.told]
            self._posted[boundary].append(
                self._items.messages(group, told, f"shape of {_message(operation)}")
            )
        else:
            self._posted[boundary].append(self._ask_for(boundary, operation))

    def _ask_for(self, boundary: int, operation: Operation) -> int:
        side = self._of.sides[boundary]
        group = side.inward[self._num_asked[boundary] % len(side.inward)]
        self._num_asked[boundary] += 1
        return self._items.messages(
            group, [(peer, False) for peer in side.peers], _message(operation)
        )

    def _send(self, operation: Operation) -> None:
        boundary = self._of.schedule.boundary(self._of.stage, operation)
        # Communicators of a direction take turns, message by message.
        side, number = self._of.sides[boundary], len(self._sent[boundary])
        sent = []
        if side.shapes and operation.kind == "send_forward":
            group = side.shapes[number % len(side.shapes)]
            told = [(peer, True) for peer in side.told]
            if told:
                sent.append(self._items.messages(group, told, f"shape of {_message(operation)}"))
        group = side.outward[number % len(side.outward)]
        peers = [(peer, True) for peer in side.peers]
        sent.append(self._items.messages(group, peers, _message(operation)))
        self._sent[boundary].append(tuple(sent))

    def _receive(self, operation: Operation) -> None:
        message = self._of.schedule.message(self._of.stage, operation)
        boundary = message.boundary
        # Receives of a boundary are taken in the order in which they were posted.
        operation_number = self._posted[boundary].popleft()
        self._items.wait(operation_number)
        # The host reads the shape before it can ask for the activation.
        if self._of.sides[boundary].shapes and operation.kind == "recv_forward":
            self._items.sync()
            self._items.wait(self._ask_for(boundary, operation))
        if self._of.tensor is not None and not self._of.in_sequence:
            # Parts of an arrived activation.
            self._items.done(self._of.tensor, f"gather of {_message(operation)}")
        if not self._forward_only:
            self._forget(boundary, self._of.arrived[message])

    def _forget(self, boundary: int, num_arrived: int) -> None:
        # Each send that has arrived is waited for once, oldest first.
        while self._forgotten[boundary] < num_arrived:
            for operation in self._sent[boundary][self._forgotten[boundary]]:
                self._items.wait(operation)
            self._forgotten[boundary] += 1


def _message(operation: Operation) -> str:
    """Write what a send or a receive moves."""
    kind = "activation" if operation.kind.endswith("forward") else "gradient"
    chunk = f" of chunk {operation.chunk}" if operation.chunk else ""
    way = "from" if operation.kind in RECEIVES else "to"
    return f"{kind} {operation.micro_batch}{chunk} {way} its neighbour"
