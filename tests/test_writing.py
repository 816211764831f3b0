"""Files that commands write: devices and links stay what they are, and what cannot be written is
said before the work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import FileFormatError
from megatron_hetero.files import check_writable, make_folder, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "one-workstation"


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    # A pipe stands for a device: tests may run as root, and a rename would replace /dev/null.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_json, args=(pipe, {"a": 1}))
    writer.start()
    assert pipe.read_text() == '{\n  "a": 1\n}\n'
    writer.join()
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    link, target = tmp_path / "latest.json", tmp_path / "plans" / "1.json"
    target.write_text("old")
    link.symlink_to(Path("plans") / "1.json")
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".", "it is a folder; name a file in it"),
        ("plans", "it is a folder; name a file in it"),
        ("none/plan.json", "there is no folder"),
        ("file/plan.json", "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_said(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "file").write_text("")
    for write in (check_writable, lambda path: write_json(path, {})):
        with pytest.raises(FileFormatError, match=f"cannot be written: {reason}"):
            write(tmp_path / name)
    with pytest.raises(FileFormatError, match="the folder cannot be made: Not a directory"):
        make_folder(tmp_path / "file" / "fleet")


@pytest.mark.parametrize("verb", ["plan", "report", "launch", "init"])
def test_verbs_say_that_they_cannot_write(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    cluster, model = str(EXAMPLE / "cluster.yaml"), str(EXAMPLE / "llama-1.5b.flags")
    plan = ["plan", "--cluster", cluster, "--model", model, "--stock", "-o", "plan.json"]
    if verb in ("report", "launch"):
        assert main(plan) == 0
    argv = {
        "plan": [*plan, "-o", "file/plan.json"],
        "report": ["report", "plan.json", "--cluster", cluster, "-o", "file/page.html"],
        "launch": ["launch", "plan.json", "--for", "ssh", "-o", "file/fleet"],
        "init": ["init", "--node", "a=2xA100-80GB", "-o", "file/cluster.yaml"],
    }[verb]
    assert main(argv) == 4
    error = capsys.readouterr().err
    assert "cannot be" in error and "Traceback" not in error


def test_commands_to_go_on_with_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster, model = str(EXAMPLE / "cluster.yaml"), str(EXAMPLE / "llama-1.5b.flags")
    plan = ["plan", "--cluster", cluster, "--model", model, "--stock"]
    assert main([*plan, "-o", "my plan.json"]) == 0
    assert "next: megatron-hetero flags 'my plan.json'" in capsys.readouterr().out
    assert main(["launch", "my plan.json", "--for", "ssh", "-o", "my fleet"]) == 0
    assert "Start: bash 'my fleet'/start.sh" in capsys.readouterr().out
    assert main(["init", "--node", "a=2xA100-80GB", "-o", "my cluster.yaml"]) == 0
    assert "--cluster 'my cluster.yaml'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="writes to a full device")
def test_a_full_disk_is_said_in_one_line() -> None:
    argv = ["plan", "--memory", "--model", str(EXAMPLE / "llama-1.5b.flags"), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_hetero", *argv],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
