"""`core.dist_checkpointing.strategies.torch._get_filesystem_reader`: metadata that run no code.

torch unpickles a checkpoint's `.metadata`, which may be anybody's code, and has no option against
it.  Megatron makes its reader in this one function, which two modules know by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

_WHY = "a checkpoint's metadata must not run code"
_NAME = "_get_filesystem_reader"
_KNOWN = {"c2eec82e40c68661": TESTED}
_MODULES = "megatron.core.dist_checkpointing"
STRATEGY = Replacement(f"{_MODULES}.strategies.torch", _NAME, _WHY, _KNOWN, is_stock=True)
SERIALIZATION = Replacement(f"{_MODULES}.serialization", _NAME, _WHY, _KNOWN, is_stock=True)


def apply(read: Callable[[Path], Any]) -> None:
    """`read(path)` reads the metadata of every checkpoint in a file system from now on."""
    # Each of the two modules has the function under a name of its own.
    for replacement in (STRATEGY, SERIALIZATION):
        replacement.apply(_checked(replacement.original(), read))


def _checked(original: Callable[..., Any], read: Callable[[Path], Any]) -> Callable[..., Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    @wraps(original)
    def reader_of(checkpoint_dir: Any, *given: Any, **named: Any) -> Any:
        reader = original(checkpoint_dir, *given, **named)
        if not isinstance(reader, FileSystemReader):
            return reader  # of an object store, whose client reads its own way

        def read_metadata(*_: Any, **__: Any) -> Any:
            found = read(Path(checkpoint_dir) / ".metadata")
            # torch's own reader leaves its number in the metadata too.
            if getattr(found, "storage_meta", None) is None:
                found.storage_meta = StorageMeta()
            found.storage_meta.load_id = reader.load_id
            return found

        reader.read_metadata = read_metadata
        return reader

    return reader_of
