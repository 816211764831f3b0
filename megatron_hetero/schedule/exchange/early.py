"""Gradients that are exchanged within the backward passes: when they are complete, and how many
find room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cost.sync.buckets import EMBEDDING, StageBucket, StageId
from megatron_hetero.cost.sync.room import EarlyRoom
from megatron_hetero.schedule.parts import Collective, Final


@dataclass(frozen=True)
class PassLayers:
    """The passes of one direction of a stage, layer by layer.

    `chunks`: [chunk] -> (first layer, number of layers, seconds of its layers, seconds of what
    comes before them in the model).
    """

    chunks: tuple[tuple[int, int, float, float], ...]

    def place_of(self, layer: int) -> tuple[int, float]:
        """Return the chunk with `layer`, and the seconds of all that comes before the layer in the
        chunk; of what follows the layers, and of copies of words, those of the last chunk."""
        for chunk, (first, num_layers, layers_s, before_s) in enumerate(self.chunks):
            if first <= layer < first + num_layers:
                return chunk, (layer - first) / num_layers * layers_s + before_s
        if layer == EMBEDDING and not self.chunks[0][0]:
            return 0, 0.0
        chunk, (_, _, layers_s, before_s) = max(
            enumerate(self.chunks), key=lambda entry: entry[1][0]
        )
        return chunk, layers_s + before_s


class LastBackward(PassLayers):
    """The last backward passes of a first stage."""

    def slower(self, factor: float) -> LastBackward:
        """Return the same passes, `factor` times as long."""
        return LastBackward(
            tuple((first, num, factor * a, factor * b) for first, num, a, b in self.chunks)
        )

    def final(self, layer: int) -> Final:
        """Return when the gradients down to `layer` are complete."""
        # Backward goes down the layers: above `layer` all is done, below it some time is left.
        return Final(*self.place_of(layer))

    def in_last_pass(self, layer: int) -> Final:
        """Return when our runtime may exchange the gradients down to `layer`: within the last pass
        of the stage, that of its first chunk (`schedule.orders.early_gradients`)."""
        # Chunks that are done before the last pass wait for its beginning.
        found = self.final(layer)
        _, _, layers_s, before_s = self.chunks[0]
        return found if not found.chunk else Final(early_s=layers_s + before_s)


def with_room(exchanges: Sequence[tuple[StageBucket, Collective]]) -> tuple[Collective, ...]:
    """Let gradients of layers start after the passes from the first one on for which a rank of
    a first stage has no room."""
    # `late`: the deepest layer that found no room; all before it go after the passes too.
    room, late = EarlyRoom(), EMBEDDING - 1
    for bucket, made in exchanges:
        parts: dict[int, dict[StageId, float]] = {}
        for holder, place in made.ranks:
            parts.setdefault(place, {})[holder] = made.buffers.get(holder, 0.0)
        if not all(room.take(own, place=place) for place, own in parts.items()):
            late = max(late, bucket.layer)
    # No `final` means that the exchange starts when the stage's programme is done.
    return tuple(
        replace(made, final={}) if bucket.layer <= late else made for bucket, made in exchanges
    )
