"""The folder for the files of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def kept_folder(keep: Path | None, verb: str) -> Iterator[Path]:
    """Yield a folder for the files of a run: `keep`, which stays, or a temporary one.

    `verb` is the name of the run, for the name of a temporary folder.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"megatron-hetero-{verb}-") as folder:
        yield Path(folder)
