"""Write what the planner answers today into the examples of README.md (a test compares them).

    python tools/refresh_readme.py

The sentences around the examples are checked by nobody: read them again after a change.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import textwrap
from pathlib import Path

from megatron_hetero.cli.main import main as run

ROOT = Path(__file__).resolve().parent.parent


def answer(folder: str, model: str, *more: str) -> str:
    """What `plan` prints for an example on a terminal of 80 columns."""
    out = io.StringIO()
    files = ["--cluster", f"{folder}/cluster.yaml", "--model", f"{folder}/{model}"]
    with contextlib.redirect_stdout(out):
        code = run(["plan", *files, *more])
    if code != 0:
        raise SystemExit(f"{folder}: plan ended with status {code}")
    return out.getvalue()


def main() -> None:
    """Replace the first example's whole answer, and the table and the gain of the second."""
    page = ROOT / "README.md"
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "examples", Path(folder, "examples"))
        os.chdir(folder)
        first = answer("examples/a100-rtx4090", "gpt-7b.sh", "-o", "plan.json")
        second = answer("examples/rtx3080-rtx4090", "gpt-1.3b.sh")
    os.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    text = _replaced(r"(?<=```\n)model  .*?(?=```\n)", first, text)
    table = second[second.index("Replica 0") : second.index("\n\ntime: ")]
    text = _replaced(r"  Replica 0 .*?(?=\n  ```)", textwrap.indent(table, "  "), text)
    slower = re.search(r"best of stock Megatron .* \+([0-9.]+%)", second)
    if slower is not None:
        found = r"(?<=stock Megatron's own takes )[0-9.]+%"
        text = _replaced(found, slower[1], text)
    page.write_text(text, encoding="utf-8")


def _replaced(pattern: str, new: str, text: str) -> str:
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise SystemExit(f"README.md has no place like {pattern}")
    return text[: found.start()] + new + text[found.end() :]


if __name__ == "__main__":
    main()
