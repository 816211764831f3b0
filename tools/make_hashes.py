"""Print `requirements-dev.txt`: the versions of constraints.txt with the SHA-256 of their wheels.

python tools/make_hashes.py            # rewrites the file; asks pip, which asks its index

The hashes are of wheels for Linux on x86-64, of each Python that is supported.  torch brings CUDA
libraries that only it knows the versions of; these come last, and an environment that has another
build of torch leaves them out (tools/make_env.sh).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, FILE = ROOT / "constraints.txt", ROOT / "requirements-dev.txt"
PYTHONS = ("3.12", "3.13")
OF_TORCH = "# torch, and what it brings; left out where another build of torch is there\n"
BESIDE_TORCH = ("triton",)
"""Needed by Megatron whatever the build of torch is (setup.py)."""

Pins = dict[tuple[str, str], set[str]]
"""(name, version) -> the SHA-256 of its wheels."""


def pinned() -> list[str]:
    """The lines of constraints.txt that pin something."""
    lines = CONSTRAINTS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def wheels(python: str, requirements: Sequence[str], *options: str) -> Iterator[tuple[str, ...]]:
    """Yield (name, version, SHA-256) of the wheels that pip would install for a Python."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", *options]
        words += ["--ignore-installed", "--only-binary=:all:", f"--python-version={python}"]
        words += [f"--target={folder}/none", f"--report={report}", *requirements]
        subprocess.run(words, check=True)
        for item in json.loads(report.read_text())["install"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
            yield name, item["metadata"]["version"], sha256


def text() -> str:
    """The file."""
    of_torch = [line for line in pinned() if line.startswith("torch==")]
    others = [line for line in pinned() if line not in of_torch]
    upper: Pins = {}
    lower: Pins = {}
    for python in PYTHONS:
        for name, version, sha256 in wheels(python, others, "--no-deps"):
            upper.setdefault((name, version), set()).add(sha256)
        for name, version, sha256 in wheels(python, of_torch, f"--constraint={CONSTRAINTS}"):
            if name in BESIDE_TORCH:
                upper.setdefault((name, version), set()).add(sha256)
            elif (name, version) not in upper:
                lower.setdefault((name, version), set()).add(sha256)
    head = (
        "# What a developer's environment holds, with the SHA-256 of its wheels for Linux, x86-64, "
        f"and\n# Python {' and '.join(PYTHONS)}.  Printed by tools/make_hashes.py from "
        "constraints.txt.\n\n"
    )
    return head + _lines(upper) + "\n" + OF_TORCH + _lines(lower)


def _lines(pins: Pins) -> str:
    return "".join(
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{h}" for h in sorted(hashes))])
        + "\n"
        for (name, version), hashes in sorted(pins.items())
    )


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    FILE.write_text(text())
    print(FILE)


if __name__ == "__main__":
    main()
