"""A checkpoint's metadata: classes of data are read, code is refused and not run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime.state.metadata_reading import read_metadata


def metadata(relative_path: str = "__0_0.distcp") -> Metadata:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4]), [chunk])
    return Metadata(
        state_dict_metadata={"weight": tensor, "common_state": BytesStorageMetadata()},
        storage_data={MetadataIndex("weight", [0]): _StorageInfo(relative_path, 0, 8)},
    )


def metadata_bytes() -> bytes:
    """A file of metadata of one tensor."""
    return pickle.dumps(metadata())


def test_metadata_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(metadata()))
    assert read_metadata(path) == metadata()


class _Planted:
    def __init__(self, call: Any, *args: Any) -> None:
        self._made = call, args

    def __reduce__(self) -> Any:
        return self._made


@pytest.mark.parametrize("call", [exec, eval, __import__, getattr, Path.touch, torch.load])
def test_code_in_metadata_is_not_run(call: Any, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    argument = mark if call is Path.touch else f"open({str(mark)!r}, 'w')"
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"state_dict_metadata": _Planted(call, argument)}))
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        read_metadata(path)
    assert not mark.exists()


def test_metadata_point_into_their_own_folder(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(metadata("../other/__0_0.distcp")))
    with pytest.raises(CheckpointError, match="no file of its folder"):
        read_metadata(path)


def test_every_truncation_is_a_typed_error(tmp_path: Path) -> None:
    path, whole = tmp_path / ".metadata", pickle.dumps(metadata())
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_metadata(path)
