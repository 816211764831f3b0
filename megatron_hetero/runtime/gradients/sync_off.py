"""When a step's gradient sync may start: Megatron's own switches, for a programme of passes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from megatron_hetero.schedule.programme import Operation


class GradientSyncOff(contextlib.ExitStack):
    """Keeps each chunk's gradient sync off until its last gradient of the step.

    As in Megatron's schedules: `config.no_sync_func` is one function, or one for each chunk; with a
    `config.grad_sync_func` (`--align-grad-reduce`) only the first stage lets its last backward pass
    start the sync, the others start it at the end.
    """

    def __init__(
        self, config: Any, chunks: Sequence[Any], is_first_stage: bool, last: set[Operation]
    ) -> None:
        """`last`: the operations that make the last gradients of the step."""
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
        """From now on the chunk's gradients are final."""
        self._off.pop(chunk).close()

    def start_left(self) -> None:
        """At the end of the programme: start the syncs that no backward pass has started."""
        for chunk in list(self._off):
            self.end(chunk)
            sync = self._syncs[chunk]
            if sync is not None:
                sync(self._chunks[chunk].parameters())


def _for_each(value: Any, chunks: Sequence[Any]) -> list[Any]:
    """Megatron's configuration has a list where there are several chunks."""
    return value if isinstance(value, list) else [value] * len(chunks)
