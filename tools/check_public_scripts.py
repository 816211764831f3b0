"""Compare what is read of public launch scripts with what bash makes of them.

python tools/check_public_scripts.py REPOSITORY... [-o benchmarks/results/public_scripts.json]

Each REPOSITORY is a git directory.  Its scripts that start training are written to a temporary
folder, run by bash with an empty environment, no network and stubs in place of every program
(`torchrun`, `python`, ... print their arguments), and read by `model.script`.  Nothing of theirs is
kept but names and counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from megatron_hetero.errors import HeteroError
from megatron_hetero.files import read_text
from megatron_hetero.model.arguments import leading_holes
from megatron_hetero.model.script import Script, read_script
from megatron_hetero.model.shell.values import Word

STARTS = ("torchrun", "python", "python3", "deepspeed", "accelerate", "numactl", "ssh")
HARMLESS = (
    "bash",
    "tee",
    "dirname",
    "basename",
    "cut",
    "tr",
    "seq",
    "expr",
    "cat",
    "sed",
    "awk",
    "grep",
)
_STUB = '#!/bin/bash\nprintf "%s\\0" "$#" "$@" >> "$STUB_LOG"\n'
_SRUN = """#!/bin/bash
for ((i = 1; i <= $#; i++)); do
  case "${!i}" in bash|sh|torchrun|python*) exec "${@:i}" ;; esac
done
"""
_PRELUDE = """exit() { :; }
source() { if [ -f "$1" ]; then builtin source "$@"; fi; true; }
.() { source "$@"; }
set() { case "$1" in [-+][a-z]*) ;; *) builtin set "$@" ;; esac; }
"""
"""An empty environment lacks what a script checks for: it goes on where it would stop."""
_AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
_WANTED = re.compile(r"pretrain_?\w*\.py|train_gpt|pretrain_gpt|--num-layers")
_UNSAFE = re.compile(r"\bkill\b|/proc/|/sys/|/dev/tcp|\bulimit\b")


def covered(words: Sequence[Word], arguments: Sequence[str]) -> bool:
    """Return whether words are `arguments`, where each that is not known may be any number."""
    reached = {0}
    for word in words:
        if word.is_known:
            reached = {i + 1 for i in reached if i < len(arguments) and arguments[i] == word.text}
        else:
            first = min(reached, default=len(arguments) + 1)
            reached = set(range(first, len(arguments) + 1))
    return len(arguments) in reached


def by_bash(script: Path, folder: Path, stubs: Path) -> list[list[str]]:
    """Return the arguments of each program that bash starts; it runs as nobody, off the network."""
    log = folder / "stub.log"
    log.write_bytes(b"")
    log.chmod(0o666)
    given = [f"PATH={stubs}", f"STUB_LOG={log}", f"BASH_ENV={stubs}/prelude"]
    words = ["env", "-i", *given, "/bin/bash", "--noprofile", "--norc", script.name]
    alone = ["unshare", "--net"] if os.geteuid() == 0 else []
    limits = ["prlimit", "--fsize=1000000", "--nproc=200", "--cpu=10"]
    try:
        subprocess.run(
            [*alone, *_AS_NOBODY, *limits, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd=script.parent,
            timeout=30,
        )
    except subprocess.TimeoutExpired:
        return []
    fields = log.read_bytes().decode(errors="replace").split("\0")
    starts: list[list[str]] = []
    position = 0
    while position < len(fields) - 1 and fields[position].isdecimal():
        count = int(fields[position])
        starts.append(fields[position + 1 : position + 1 + count])
        position += 1 + count
    return starts


def make_stubs(folder: Path) -> None:
    """Write the programs that a script finds."""
    folder.mkdir()
    for name in STARTS:
        (folder / name).write_text(_STUB)
    for name in ("srun", "mpirun", "nohup", "time"):
        (folder / name).write_text(_SRUN)
    (folder / "prelude").write_text(_PRELUDE)
    for stub in folder.iterdir():
        stub.chmod(0o755)
    for name in HARMLESS:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)


def judged(read: Script, starts: Sequence[Sequence[str]]) -> str:
    """Return whether a script is read whole, in part, or wrong."""
    tails = [
        list(start[i + 1 :])
        for start in starts
        for i, word in enumerate(start)
        if word.endswith(".py") or (i and start[i - 1] == "-m")
    ]
    says_more = any(part.may_change_model for part in (*read.unread, *leading_holes(read.words)))
    is_whole = all(word.is_known for word in read.words) and not says_more
    name = "whole" if is_whole else "named"
    if not tails:
        return f"{name}, bash starts nothing"
    if any(covered(read.words, tail) for tail in tails):
        return name
    return "differs, and says why" if says_more else "wrong"


def scripts_of(repository: Path, folder: Path) -> Iterator[Path]:
    """Write a repository's shell files to a folder; yield those that start training."""
    listed = subprocess.run(
        ["git", "-C", str(repository), "ls-tree", "-r", "--name-only", "HEAD"],
        capture_output=True, check=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    names = [name for name in listed if name.endswith((".sh", ".slurm", ".sbatch"))]
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", "HEAD", *names], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        try:
            text = read_text(path)
        except HeteroError:
            continue
        if _WANTED.search(text) and re.search(r"--\w+-\w+", text) and not _UNSAFE.search(text):
            yield path


def checked(repository: Path, most: int, stubs: Path) -> dict[str, object]:
    """Return the counts of one repository, and the scripts that are read otherwise."""
    counts: Counter[str] = Counter()
    differing: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        found = sorted(scripts_of(repository, folder / "files"))
        step = max(1, len(found) // most)
        for path in found[::step][:most]:
            where = str(path.relative_to(folder / "files"))
            try:
                read = read_script(path, read_text(path))
            except HeteroError:
                counts["refused"] += 1
                continue
            verdict = judged(read, by_bash(path, folder, stubs))
            counts[verdict] += 1
            if verdict in ("wrong", "differs, and says why"):
                differing.append(where)
    commit, date = subprocess.run(
        ["git", "-C", str(repository), "log", "-1", "--format=%H %cs"],
        capture_output=True, check=True, text=True,
    ).stdout.split()  # fmt: skip
    shown = repository.parent.name if repository.name == "repo" else repository.name
    return {
        "repository": shown.replace("+", "/"),
        "commit": commit,
        "date": date,
        **dict(counts),
        "differing": differing,
    }


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("repositories", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=12, help="scripts of each repository")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        stubs = Path(name) / "stubs"
        make_stubs(stubs)
        rows = [checked(path, arguments.most, stubs) for path in arguments.repositories]
    for row in rows:
        print(json.dumps(row))
    total = Counter[str]()
    for row in rows:
        total.update({k: v for k, v in row.items() if isinstance(v, int)})
    print(dict(total))
    if arguments.output is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, check=True, text=True
        ).stdout.strip()
        day = datetime.date.today().isoformat()
        found = {"commit": commit, "day": day, "rows": rows, "total": total}
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
