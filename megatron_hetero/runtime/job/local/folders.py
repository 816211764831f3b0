"""The folder for the files of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_hetero.files import make_folder


@contextmanager
def kept_folder(keep: Path | None, verb: str) -> Iterator[Path]:
    """Yield a folder for the files of a run: `keep`, which stays, or a temporary one.

    `verb` is the name of the run, for the name of a temporary folder.

    Raises:
        FileFormatError: `keep` cannot be made.
    """
    if keep is not None:
        make_folder(keep)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"megatron-hetero-{verb}-") as folder:
        yield Path(folder)
