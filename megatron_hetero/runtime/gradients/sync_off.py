"""Delay of a step's gradient sync to its last gradients, by Megatron's own switches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from megatron_hetero.schedule.programme import Operation


class GradientSyncOff(contextlib.ExitStack):
    """Context that keeps each chunk's gradient sync off until the chunk's last gradient of the
    step.

    As in Megatron's schedules, `config.no_sync_func` is one function, or one for each chunk. With a
    `config.grad_sync_func` (`--align-grad-reduce`) only the first stage lets its last backward pass
    start the sync; the others start it at the end.
    """

    def __init__(
        self, config: Any, chunks: Sequence[Any], is_first_stage: bool, last: set[Operation]
    ) -> None:
        """Prepare the switches of all chunks.

        Args:
            config: Megatron's configuration of the model.
            chunks: the model chunks of this rank.
            is_first_stage: this rank is on the first stage.
            last: the operations that complete the gradients of the step, one for each chunk.
        """
        super().__init__()
        self._chunks = chunks
        self._functions = _for_each(config.no_sync_func, self._chunks)
        self._syncs = _for_each(config.grad_sync_func, self._chunks)
        self._off: dict[int, contextlib.ExitStack] = {}
        starts_itself = config.grad_sync_func is None or is_first_stage
        self.last_gradients = last if starts_itself else set()

    def __enter__(self) -> GradientSyncOff:
        for chunk, function in enumerate(self._functions):
            self._off[chunk] = self.enter_context(contextlib.ExitStack())
            if function is not None:
                self._off[chunk].enter_context(function())
        return self

    def end(self, chunk: int) -> None:
        """Turn the sync of a chunk on: its next gradients are the last ones."""
        self._off.pop(chunk).close()

    def start_left(self) -> None:
        """Start, at the end of the programme, the syncs that no backward pass has started."""
        for chunk in list(self._off):
            self.end(chunk)
            sync = self._syncs[chunk]
            if sync is not None:
                sync(self._chunks[chunk].parameters())


def _for_each(value: Any, chunks: Sequence[Any]) -> list[Any]:
    """Return one value for each chunk; Megatron has a list only where there are several."""
    return value if isinstance(value, list) else [value] * len(chunks)
