"""`patch`: a tree is recognised, patched, reverted to the byte, or left alone.

A real tree is used where `MEGATRON_LM_TREE` names one; the rest runs on a tree made up here, with
patches of its own.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import MegatronVersionError
from megatron_hetero.patching import tree as patching
from megatron_hetero.patching.unified_diff import hunks_of

SCRIPT = "import megatron\r\n\nif __name__ == '__main__':\n    pretrain()\n# ende, ümlaut\n"
PATCHED = SCRIPT.replace("    pretrain()\n", "    pretrain = hooked(pretrain)\n    pretrain()\n")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree whose release is the only one known."""
    patches = tmp_path / "patches"
    patches.mkdir()
    lines = [[f"{line}\n" for line in text.split("\n")[:-1]] for text in (SCRIPT, PATCHED)]
    diff = "".join(difflib.unified_diff(*lines, "a/pretrain_gpt.py", "b/pretrain_gpt.py"))
    (patches / "it.patch").write_bytes(diff.encode())
    release = {
        "release": "made-up",
        "carried_by": "nobody",
        "file": "pretrain_gpt.py",
        "patch": "it.patch",
        "sha256": sha256(SCRIPT),
        "patch_sha256": sha256(diff),
    }
    (patches / "releases.json").write_text(json.dumps([release]))
    monkeypatch.setattr(patching, "patches_folder", lambda: patches)
    tree = tmp_path / "tree"
    (tree / "megatron" / "core").mkdir(parents=True)
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 3\n")
    (tree / "pretrain_gpt.py").write_bytes(SCRIPT.encode())
    (tree / "pretrain_gpt.py").chmod(0o755)
    return tree


def test_apply_and_revert_give_the_very_bytes(root: Path, capsys) -> None:
    script = root / "pretrain_gpt.py"
    assert main(["patch", str(root), "--apply"]) == 0
    assert script.read_bytes() == PATCHED.encode()
    assert main(["patch", str(root), "--revert"]) == 0
    assert script.read_bytes() == SCRIPT.encode()
    assert script.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in root.iterdir()) == ["megatron", "pretrain_gpt.py"]


def test_a_link_to_the_script_stays_a_link(root: Path, tmp_path: Path) -> None:
    script, real = root / "pretrain_gpt.py", tmp_path / "elsewhere.py"
    script.rename(real)
    script.symlink_to(real)
    assert main(["patch", str(root), "--apply"]) == 0
    assert script.is_symlink()
    assert real.read_bytes() == PATCHED.encode()


def test_a_disk_that_takes_no_file(root: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["patch", str(root), "--apply"]) == 4
    assert "cannot be written: Read-only file system" in capsys.readouterr().err
    assert (root / "pretrain_gpt.py").read_bytes() == SCRIPT.encode()
    assert sorted(path.name for path in root.iterdir()) == ["megatron", "pretrain_gpt.py"]


def test_check_changes_nothing_and_shows_the_patch(root: Path, capsys) -> None:
    assert main(["patch", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "unpatched" in shown and "+    pretrain = hooked(pretrain)" in shown
    assert (root / "pretrain_gpt.py").read_bytes() == SCRIPT.encode()


def test_json(root: Path, capsys) -> None:
    assert main(["patch", str(root), "--apply", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "release": "made-up",
        "file": str(root / "pretrain_gpt.py"),
        "state": "patched",
        "changed": True,
    }


@pytest.mark.parametrize(
    ("before", "action", "words"), [("--apply", "--apply", "already"), (None, "--revert", "not")]
)
def test_what_is_done_already_is_refused(
    root: Path, capsys, before: str | None, action: str, words: str
) -> None:
    if before:
        assert main(["patch", str(root), before]) == 0
    content = (root / "pretrain_gpt.py").read_bytes()
    assert main(["patch", str(root), action]) == 2
    assert f"patched {words}" in capsys.readouterr().err or words == "not"
    assert (root / "pretrain_gpt.py").read_bytes() == content


def test_a_tree_that_is_not_known_is_left_alone(root: Path, capsys) -> None:
    """One byte more, as after somebody's own edit."""
    (root / "pretrain_gpt.py").write_bytes(SCRIPT.encode() + b"#")
    assert main(["patch", str(root), "--apply"]) == 5
    message = " ".join(capsys.readouterr().err.split())
    assert sha256(SCRIPT + "#") in message
    assert "megatron-core 0.18.3" in message and "known: nobody" in message
    assert "The runtime does not work with megatron-core 0.18.3, patched or not" in message
    assert "megatron_hetero.launch" not in message, "the docs forbid it for this release"
    assert "other lines are edited" in message
    assert (root / "pretrain_gpt.py").read_bytes() == SCRIPT.encode() + b"#"


def test_line_ends_of_windows_are_named(root: Path, capsys) -> None:
    script = root / "pretrain_gpt.py"
    plain = SCRIPT.replace("\r\n", "\n")
    entry = json.loads((patching.patches_folder() / "releases.json").read_text())
    entry[0]["sha256"] = sha256(plain)
    (patching.patches_folder() / "releases.json").write_text(json.dumps(entry))
    script.write_bytes(plain.replace("\n", "\r\n").encode())
    assert main(["patch", str(root), "--apply"]) == 5
    assert "line ends of Windows (CRLF)" in " ".join(capsys.readouterr().err.split())


def test_an_edited_line_of_the_hook_is_shown(root: Path, capsys) -> None:
    script = root / "pretrain_gpt.py"
    (release,) = patching.releases()
    (hunk,) = hunks_of(patching.patch_text(release), release.patch)
    lines = SCRIPT.splitlines(keepends=True)
    number = hunk.start + len(hunk.before) - 1
    lines[number - 1] = "edited = 1\n"
    script.write_text("".join(lines))
    assert main(["patch", str(root), "--apply"]) == 5
    message = " ".join(capsys.readouterr().err.split())
    assert f"pretrain_gpt.py:{number}: beside made-up: it has 'edited = 1'" in message


def test_what_is_no_tree_says_what_it_lacks(root: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["patch", str(tmp_path / "empty")]) == 5
    message = " ".join(capsys.readouterr().err.split())
    assert "no pretrain_gpt.py, no megatron/core/package_info.py" in message
    assert main(["patch", str(tmp_path / "none")]) == 2


def test_a_damaged_patch_changes_nothing(root: Path, capsys) -> None:
    patch = patching.patches_folder() / "it.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+    pretrain = hooked", b"+    pretrain = x"))
    assert main(["patch", str(root), "--apply"]) == 4
    assert (root / "pretrain_gpt.py").read_bytes() == SCRIPT.encode()


def test_the_shipped_patches_add_lines_and_take_none() -> None:
    for release in patching.releases():
        for hunk in hunks_of(patching.patch_text(release), release.patch):
            kept = iter(hunk.after)
            assert all(line in kept for line in hunk.before)
            added = [line for line in hunk.after if line not in hunk.before]
            assert any("from megatron_hetero.hook import hooked" in line for line in added)
            assert len(added) <= 8


def test_a_real_tree(tmp_path: Path, capsys) -> None:
    """The tree that `MEGATRON_LM_TREE` names, copied, patched and reverted."""
    named = os.environ.get("MEGATRON_LM_TREE")
    if not named:
        pytest.skip("needs MEGATRON_LM_TREE=<a Megatron-LM checkout>")
    original = (Path(named) / "pretrain_gpt.py").read_bytes()
    shutil.copy(Path(named) / "pretrain_gpt.py", tmp_path)
    assert main(["patch", str(tmp_path), "--apply"]) == 0
    compile((tmp_path / "pretrain_gpt.py").read_text(), "pretrain_gpt.py", "exec")
    assert main(["patch", str(tmp_path), "--revert"]) == 0
    assert (tmp_path / "pretrain_gpt.py").read_bytes() == original


def test_nothing_is_recommended_that_cannot_work(tmp_path: Path) -> None:
    """A folder that is no checkout has no script to launch, and no commit to check out."""
    with pytest.raises(MegatronVersionError, match="This is no Megatron-LM checkout") as raised:
        patching.recognise(tmp_path)
    assert "megatron_hetero.launch" not in str(raised.value)
    assert "one of these commits" not in str(raised.value)
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\n")
    with pytest.raises(MegatronVersionError, match=r"-m megatron_hetero\.pretrain_gpt") as raised:
        patching.recognise(tmp_path)
    assert "megatron_hetero.launch" not in str(raised.value)
    (tmp_path / "pretrain_gpt.py").write_text("x = 1\n")
    with pytest.raises(MegatronVersionError, match=r"python -m megatron_hetero\.launch"):
        patching.recognise(tmp_path)
