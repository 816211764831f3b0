"""Delay of a step's gradient sync until its last gradients, by Megatron's own switches."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_hetero.schedule.programme import Operation


class DelayedSync(contextlib.ExitStack):
    """Context that keeps each chunk's gradient sync off until the step may start it.

    As in Megatron's schedules, `config.no_sync_func` and `config.grad_sync_func` are one function,
    or one for each chunk.
    """

    def __init__(
        self, config: Any, chunks: Sequence[Any], early: Mapping[Operation, Collection[int]]
    ) -> None:
        """Prepare the switches of all chunks.

        Args:
            config: Megatron's configuration of the model.
            chunks: the model chunks of this rank.
            early: operations with which chunks start their syncs
                (`schedule.orders.early_gradients`); all others start at the end of the programme.
        """
        super().__init__()
        self._chunks = chunks
        self._functions = _for_each(config.no_sync_func, self._chunks)
        self._syncs = _for_each(config.grad_sync_func, self._chunks)
        self._early = early
        self._off: dict[int, contextlib.ExitStack] = {}

    def __enter__(self) -> DelayedSync:
        # Each chunk's sync is turned on by itself; an error turns all of them on again.
        for chunk, function in enumerate(self._functions):
            self._off[chunk] = self.enter_context(contextlib.ExitStack())
            if function is not None:
                self._off[chunk].enter_context(function())
        return self

    def before(self, operation: Operation) -> None:
        """Turn on the syncs that an operation starts: of its own chunk, whose next gradients are
        the last ones, and of chunks that are done."""
        for chunk in self._early.get(operation, ()):
            if chunk == operation.chunk:
                self._off.pop(chunk).close()
            else:
                self._start(chunk)

    def start_remaining(self) -> None:
        """Start, at the end of the programme, the syncs that no backward pass has started."""
        for chunk in list(self._off):
            self._start(chunk)

    def _start(self, chunk: int) -> None:
        self._off.pop(chunk).close()
        sync = self._syncs[chunk]
        if sync is not None:
            sync(self._chunks[chunk].parameters())


def _for_each(value: Any, chunks: Sequence[Any]) -> list[Any]:
    """Return one value for each chunk; Megatron has a list only where there are several."""
    return value if isinstance(value, list) else [value] * len(chunks)
