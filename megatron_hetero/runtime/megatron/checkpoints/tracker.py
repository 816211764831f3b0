"""`megatron.training.checkpointing.maybe_msc.open`: the tracker is written in one step.

`save_checkpoint` truncates the tracker and writes it anew, inside of a function that it hands on
(0.19.2, `iter_finalize_fn`); a job that ends in between has no checkpoint.  This is the one name
that it opens the file by.  All other files are opened as before.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_hetero.runtime.megatron.checkpoints import save


def apply(name: str, write: Callable[[Path, str], None]) -> None:
    """Files called `name` are written by `write(path, text)` from now on.

    Raises:
        MegatronVersionError: the function that writes the tracker is not a known one.
    """
    from megatron.training import checkpointing

    # Only the opening is replaced, but the function around it has to be the known one.
    save.REPLACEMENT.check()
    files = checkpointing.maybe_msc
    # An earlier substitute goes first, so that none wraps another.
    vars(files).pop("open", None)
    original = files.open

    def open_file(path: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        # The tracker alone; an address with `://` is an object store's.
        if mode == "w" and Path(str(path)).name == name and "://" not in str(path):
            return _Whole(Path(path), write)
        return original(path, mode, *given, **named)

    files.open = open_file


class _Whole(io.StringIO):
    """A text file written on closing, unless the block failed."""

    def __init__(self, path: Path, write: Callable[[Path, str], None]) -> None:
        super().__init__()
        self._path, self._write_file = path, write

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A failed block leaves the old tracker as it is.
        if kind is None:
            self._write_file(self._path, self.getvalue())
        self.close()
