"""torch's `.metadata` of a distributed checkpoint, read without trusting pickle.

The file is a pickle, and an ordinary unpickler runs what a pickle tells it to.  Here a pickle may
name the classes of such metadata alone: data without behaviour.  Names of files in it must be of
the folder itself.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.errors import CheckpointError

_ALLOWED: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.planner": frozenset(
        ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.serialization": frozenset(("_get_layout",)),
    "torch": frozenset(("Size",)),
    "collections": frozenset(("OrderedDict",)),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the class named by a pickle, if metadata may hold that class."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, frozenset()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_metadata(path: Path) -> Any:
    """The `torch.distributed.checkpoint.metadata.Metadata` in a file.

    Raises:
        CheckpointError: the file is damaged, or holds something else than metadata.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:
        # A damaged pickle can end in any error that a constructor raises.
        raise CheckpointError(
            f"{path}: not the metadata of a distributed checkpoint: {error}. It is damaged, or "
            "somebody put code into it; nothing of it was run. Load another checkpoint."
        ) from error
    for name in named_files(found):
        if Path(name).name != name:
            raise CheckpointError(f"{path}: it names {name!r}, no file of its folder")
    _leave_strides_to_the_class(found)
    return found


def _leave_strides_to_the_class(metadata: Any) -> None:
    """Remove the strides that torch 2.15 added to the properties of a tensor.

    Megatron 0.19 passes all that a `TensorProperties` object itself has to `torch.empty`, which
    takes no strides (`load_tensors_metadata`, of `--dist-ckpt-strictness`).  Megatron writes
    contiguous tensors, for which the default of the class answers.
    """
    for entry in (getattr(metadata, "state_dict_metadata", None) or {}).values():
        properties = getattr(entry, "properties", None)
        if properties is not None:
            properties.__dict__.pop("strides", None)


def named_files(metadata: Any) -> set[str]:
    """The files that metadata say tensors are in."""
    stored = getattr(metadata, "storage_data", None) or {}
    return {str(getattr(place, "relative_path", "")) for place in stored.values()}
