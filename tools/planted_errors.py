"""Plant every error of the catalogue, and list what `verify` finds of it.

    tools/planted_errors.py run [--only TEXT]      # about half an hour of a core; the result file
    tools/planted_errors.py table [--check]        # writes docs/planted-errors.md

`run` trains the job of each error (`tests/lab/verify/faults/jobs.py`) beside one process, for each
optimizer of `verify` until something is found, and writes benchmarks/results/planted-errors.json.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from verified_runs import ROOT, header, put_page

from megatron_hetero.errors import HeteroError

RESULTS = ROOT / "benchmarks" / "results" / "planted-errors.json"
PAGE = ROOT / "docs" / "planted-errors.md"
NEWER_THAN = "2026-11-24"
"""Errors in code that came after this day are counted apart."""
BROKEN_CODE = {
    "exchange-piece-forgotten": "def add_in_order",
    "pair-sum-skipped": "class Turn:",
    "next-token-seen": "def attend(",
    "rows-sharpened": "def attend(",
    "rows-rolled": "def attend(",
    "mask-shifted": "def positions_of",
    "experts-uncounted": "def is_expert",
    "steps-miscounted": "def _translate",
    "moments-forgotten": "def _translate",
    "second-moments-doubled": "def _translate",
}
"""Error -> the first line of the code that it breaks; for errors in newer code alone."""


def _run(only: str, out: Path, skips: bool) -> None:
    # Ranks are forked, which CUDA does not survive.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_hetero.lab.verify.faults.catalogue import FAULTS
    from megatron_hetero.runtime.job.local.loading import preload
    from tests.lab.verify.faults.jobs import STEPS, find, planted

    preload()
    kept = json.loads(out.read_text())["errors"] if out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-planted-") as folder:
        for fault, plant in FAULTS.items():
            if only not in fault or (skips and fault in kept):
                continue
            error = planted(fault)
            result: dict[str, Any] = {
                "what": (inspect.getdoc(plant) or "").splitlines()[0],
                "layout": error.layout,
                "option": "--resume" if error.resumes else "",
                "since": since(BROKEN_CODE[fault]) if fault in BROKEN_CODE else "",
                "found": {},
            }
            for number, optimizer in enumerate(error.optimizers):
                runs = Path(folder) / f"{fault}-{number}"
                try:
                    result["found"][optimizer] = sorted(find(error, runs, optimizer))
                except HeteroError as refusal:
                    result["failed"] = str(refusal).splitlines()[0]
                print(fault, optimizer, result["found"].get(optimizer), file=sys.stderr, flush=True)
            kept[fault] = result
            errors = {name: kept[name] for name in FAULTS if name in kept}
            document = {**header(STEPS), "errors": errors}
            out.write_text(json.dumps(document, indent=1) + "\n")


def since(line: str) -> str:
    """Return the day on which a line came into the package, by the history."""
    command = ["git", "log", "--reverse", "--format=%as", f"-S{line}", "--", "megatron_hetero"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def is_newer(error: Mapping[str, Any]) -> bool:
    """Tell if an error is in code that came after `NEWER_THAN`."""
    return bool(error["since"] > NEWER_THAN)


def is_found(error: Mapping[str, Any]) -> bool:
    """Tell if any optimizer's run found an error."""
    return any(error["found"].values())


def page(results: Mapping[str, Any]) -> str:
    """Return the page of the results."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    from megatron_hetero.lab.verify.faults.catalogue import FAULTS

    errors = results["errors"]
    found = sum(map(is_found, errors.values()))
    by_option = sum(bool(error["option"]) for error in errors.values())
    newer = sum(map(is_newer, errors.values()))
    yield "# Errors planted on purpose, and what `verify` finds of them"
    yield ""
    yield (
        "A check that cannot fail proves nothing. Each error below is planted in the runtime of a "
        "plan's processes (`lab/verify/faults`), in a job that has the feature, and "
        "`megatron-hetero verify` has to find it beside one process of stock Megatron."
    )
    yield ""
    yield (
        f"**{found} of {len(errors)} are found**, {by_option} of them with `--resume`, all others "
        f"with default options; {newer} are in code newer than {NEWER_THAN}. "
        f"`tools/planted_errors.py run`, {results['date']}, commit {results['commit'][:8]}, "
        f"{results['machine']}, {results['steps']} steps. This page is written by "
        "`tools/planted_errors.py table`."
    )
    yield from ("", "| error | what is broken | plan | found by |", "| --- | --- | --- | --- |")
    for name, error in errors.items():
        layout = "four machines in two groups" if error["layout"] == "machines" else error["layout"]
        shown = f"`{layout}`".replace("|", "\\|") if layout == error["layout"] else layout
        words = "; ".join(
            f"{optimizer}: {', '.join(kinds) or 'nothing'}"
            for optimizer, kinds in error["found"].items()
        )
        option = f" (`{error['option']}`)" if error["option"] else ""
        mark = " *" if is_newer(error) else ""
        yield f"| {name}{mark} | {error['what']} | {shown} | {words or error['failed']}{option} |"
    absent = [name for name in FAULTS if name not in errors]
    if absent:
        yield ""
        yield (
            f"Not run for this page ({len(absent)}; `pytest -m '' tests/lab/verify/faults` has "
            f"each): {', '.join(absent)}."
        )
    yield ""
    yield f"An asterisk marks errors in code that came into the package after {NEWER_THAN}."


def main() -> int:
    """Run the command line; the exit code is 1 if the page is stale, or an error was not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="plant the errors")
    runs.add_argument("--only", default="", help="errors whose name has this text")
    runs.add_argument("--missing", action="store_true", help="errors without a result alone")
    runs.add_argument("--out", type=Path, default=RESULTS, help="result file")
    table = verbs.add_parser("table", help="write the page")
    table.add_argument("--check", action="store_true", help="compare instead of writing")
    asked = parser.parse_args()
    if asked.verb == "run":
        _run(asked.only, asked.out, asked.missing)
        return 0 if all(map(is_found, json.loads(asked.out.read_text())["errors"].values())) else 1
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    return put_page(PAGE, text, is_check=asked.check)


if __name__ == "__main__":
    sys.exit(main())
