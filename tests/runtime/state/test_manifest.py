"""Manifests: whatever changes in a folder is found and named, before anything is read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.validation import (
    save_integrity_manifest,
    verify_integrity_manifest,
)

from megatron_hetero.errors import CheckpointError, FileFormatError
from megatron_hetero.runtime.state.coverage import tiling_faults
from megatron_hetero.runtime.state.manifest import (
    MANIFEST,
    faults_of,
    read_manifest,
    strangers_in,
    write_digests,
    write_manifest,
)

FILES = {".metadata": b"meta", "__0_0.distcp": bytes(range(256)) * 8, "__1_0.distcp": b"1" * 999}


def written(folder: Path, step: int = 7, metadata: bytes = FILES[".metadata"]) -> Path:
    """A folder of two ranks' files with its manifest."""
    folder.mkdir(parents=True)
    for name, data in {**FILES, ".metadata": metadata}.items():
        (folder / name).write_bytes(data)
    for rank in (0, 1):
        write_digests(folder, rank, [f"__{rank}_0.distcp"])
    write_manifest(folder, step, "a" * 64, 2)
    return folder


def all_faults(folder: Path) -> list[str]:
    manifest = read_manifest(folder)
    return [*faults_of(folder, manifest, manifest.files), *strangers_in(folder, manifest)]


def test_a_whole_folder_has_no_fault_and_no_leftovers(tmp_path: Path) -> None:
    folder = written(tmp_path / "c")
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.num_ranks, set(manifest.files)) == (7, 2, set(FILES))
    assert all_faults(folder) == []
    assert {path.name for path in folder.iterdir()} == {*FILES, MANIFEST}


def test_every_flipped_bit_and_every_truncation_is_refused(tmp_path: Path) -> None:
    """In each file of the folder, the manifest's own included; the file is named."""
    folder = written(tmp_path / "c")
    draw = random.Random(20)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(60):
            broken = bytearray(whole)
            if draw.random() < 0.5:
                broken[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            else:
                del broken[draw.randrange(len(whole)) :]
            path.write_bytes(broken)
            try:
                assert any(fault.startswith(path.name) for fault in all_faults(folder))
            except FileFormatError as error:
                assert MANIFEST in str(error) and path.name == MANIFEST
        path.write_bytes(whole)
    assert all_faults(folder) == []


def test_what_is_missing_added_or_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "c")
    (folder / "common.pt").write_bytes(b"planted")
    assert all_faults(folder) == ["common.pt: not of this checkpoint; move it elsewhere"]
    (folder / "common.pt").unlink()
    data = (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    assert all_faults(folder) == ["__1_0.distcp: missing, or no regular file"]
    (folder / "__1_0.distcp").symlink_to(data)
    assert all_faults(folder)[0] == "__1_0.distcp: missing, or no regular file"


def test_a_manifest_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "c")
    content = json.loads((folder / MANIFEST).read_text())
    content["files"]["../c/.metadata"] = content["files"].pop(".metadata")
    del content["sha256"]
    from megatron_hetero.files import content_hash, write_json

    write_json(folder / MANIFEST, {**content, "sha256": content_hash(content)})
    with pytest.raises(CheckpointError, match="no name of a file in the folder"):
        read_manifest(folder)


def test_data_without_a_digest_get_no_manifest(tmp_path: Path) -> None:
    """A rank that could not finish its part."""
    (tmp_path / "__1_0.distcp").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="left no digest"):
        write_manifest(tmp_path, 1, None, 2)
    assert not (tmp_path / MANIFEST).exists()


@given(st.data())
def test_a_box_that_is_moved_missing_or_doubled_is_no_tiling(data: st.DataObject) -> None:
    """Boxes cut at random tile; any change of one of them does not."""
    shape = tuple(data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(data.draw(st.integers(1, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        start, stop = box[axis]
        if stop - start < 2:
            boxes.append(box)
            continue
        cut = data.draw(st.integers(start + 1, stop - 1))
        for part in ((start, cut), (cut, stop)):
            boxes.append((*box[:axis], part, *box[axis + 1 :]))
    ranks = list(enumerate(boxes))
    assert tiling_faults(shape, ranks) == []
    victim = data.draw(st.integers(0, len(boxes) - 1))
    assert tiling_faults(shape, ranks[:victim] + ranks[victim + 1 :])
    assert tiling_faults(shape, [*ranks, (99, boxes[victim])])
    moved = tuple((start + 1, stop + 1) for start, stop in boxes[victim])
    assert tiling_faults(shape, [*ranks[:victim], (victim, moved), *ranks[victim + 1 :]])


def test_megatrons_own_manifest_has_no_file_that_goes_later(tmp_path: Path) -> None:
    """Megatron hashes all files of the folder, between the ranks' digests and our manifest."""
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    for rank in (0, 1):
        write_digests(tmp_path, rank, [f"__{rank}_0.distcp"])
    save_integrity_manifest(str(tmp_path))
    write_manifest(tmp_path, 7, "a" * 64, 2)
    verify_integrity_manifest(str(tmp_path))
    assert "integrity.json" in read_manifest(tmp_path).files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*FILES, "integrity.json", MANIFEST]
    )
