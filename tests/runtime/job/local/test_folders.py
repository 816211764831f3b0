"""Folders of runs: kept, or temporary."""

from __future__ import annotations

from pathlib import Path

from megatron_hetero.runtime.job.local.folders import kept_folder


def test_a_folder_that_is_kept_stays(tmp_path: Path) -> None:
    with kept_folder(tmp_path / "kept", "verify") as folder:
        (folder / "file").write_text("1")
    with kept_folder(None, "verify") as other:
        assert other.is_dir() and "megatron-hetero-verify-" in other.name
    assert (tmp_path / "kept" / "file").is_file() and not other.exists()
