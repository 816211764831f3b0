"""Ten invented clusters: each planned, and its plan computed again by hand (`check_by_hand`).

    python tools/check_invented.py [NAME ...] [--plans FOLDER]

Prints one table; exits with 1 where the program and the sheet of paper are further apart than
allowed, and says where.  A folder of `benchmarks/invented` has cluster.yaml, and a job as a script,
a file of flags, or config.json with flags.txt beside it, which go behind `--`; the words of
plan.txt are options of `plan`.  Plans kept in the folder given with --plans are not searched again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.by_hand.paper import NotByHandError  # noqa: E402
from tools.by_hand.site import Site  # noqa: E402
from tools.check_by_hand import Row, compared, worst  # noqa: E402

INVENTED = ROOT / "benchmarks" / "invented"
COLUMNS = (
    "cluster", "GPUs", "FLOPs a step", "FLOPs apart", "bytes apart", "busiest line, %",
    "loads apart", "memory apart", "stages apart", "step, s", "by hand, s", "step apart",
)  # fmt: skip


def names() -> list[str]:
    """Return the clusters, small ones first."""
    files = sorted(INVENTED.glob("*/cluster.yaml"))
    return [path.parent.name for path in sorted(files, key=lambda path: len(path.read_text()))]


def job_of(folder: Path) -> tuple[Path, list[str]]:
    """Return the file of a folder's job, and flags that go with it."""
    jobs = [path for end in ("*.sh", "*.flags", "config.json") for path in folder.glob(end)]
    beside = folder / "flags.txt"
    return jobs[0], ["--", *beside.read_text().split()] if beside.exists() else []


def run(*words: str | Path) -> Any:
    """Run `megatron-hetero WORDS --json` and return what it prints.

    Raises:
        SystemExit: it fails.
    """
    verb, *rest = map(str, words)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_hetero", verb, "--json", *rest],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"megatron-hetero {' '.join(map(str, words))}: {done.returncode}")
    return json.loads(done.stdout)


def rows_of(name: str, plans: Path) -> list[Row]:
    """Plan a cluster, unless the plan is there, and compare it with the sheet of paper.

    Raises:
        NotByHandError: the plan does something that has no formula there.
    """
    folder, path = INVENTED / name, plans / f"{name}.json"
    cluster = folder / "cluster.yaml"
    if not path.exists():
        job, flags = job_of(folder)
        options = (
            (folder / "plan.txt").read_text().split() if (folder / "plan.txt").exists() else []
        )
        run("plan", "--cluster", cluster, "--model", job, "-o", path, *options, *flags)
    simulated = run("simulate", path, "--cluster", cluster)
    return list(compared(json.loads(path.read_text()), Site(cluster), simulated))


def line_of(name: str, rows: list[Row]) -> list[str]:
    """Make a row of the table; a step that no stage dominates in brackets."""

    def apart(kind: str) -> str:
        row = worst(rows, kind)
        return "" if row is None or row.apart is None else f"{100 * row.apart:+.2f} %"

    flops, step = worst(rows, "FLOPs"), worst(rows, "step")
    assert flops is not None and flops.program is not None
    assert step is not None and step.program is not None and step.by_hand is not None
    busiest = max((row.program or 0.0 for row in rows if row.kind == "load"), default=0.0)
    counts = step.allowed is not None
    return [
        name, str(sum(row.kind == "memory" for row in rows)),
        f"{flops.program:.4g}", apart("FLOPs"), apart("bytes"),
        f"{100 * busiest:.0f}", apart("load"), apart("memory"), apart("stage"),
        f"{step.program:.2f}", f"{step.by_hand:.2f}",
        apart("step") if counts else f"({apart('step')})",
    ]  # fmt: skip


def markdown(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write the table; figures to the right."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "| --- |" + " --: |" * (len(COLUMNS) - 1)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="folders of benchmarks/invented; default: all")
    parser.add_argument("--plans", type=Path, help="where plans are kept")
    given = parser.parse_args(argv)
    lines, wrong = [], []
    with tempfile.TemporaryDirectory() as scratch:
        plans = given.plans or Path(scratch)
        plans.mkdir(parents=True, exist_ok=True)
        for name in given.names or names():
            try:
                rows = rows_of(name, plans)
            except NotByHandError as error:
                wrong.append(f"{name}: cannot be checked by hand: {error}")
                continue
            lines.append(line_of(name, rows))
            wrong += [
                f"{name}: {row.kind} of {row.what}: {row.program} beside {row.by_hand}"
                for row in rows
                if row.is_wrong
            ]
    print("\n".join(markdown(lines)))
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
