"""Verify every plan and layout that README, docs, examples and stories print.

    tools/verify_printed.py run [--steps 3] [--only TEXT] [--minutes 15]    # hours; resumes
    tools/verify_printed.py table [--check]                 # writes docs/verified-plans.md

`run` writes benchmarks/results/verify-printed.json: what each verification found, at which commit,
when and on which class of machine.  What passed already is run again with --again alone; what is no
longer printed is dropped, and so is a command that makes another plan today.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from printed_plans import PAGE, ROOT, Printed, make_plan, printed_commands, printed_layouts
from verified_runs import header, kept_runs, put_page, when_and_where, worst_part

from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout, parse_layout

RESULTS = ROOT / "benchmarks" / "results" / "verify-printed.json"
TIMEOUT_S = 3600


def main() -> int:
    """Run the command line; the exit code is 1 if a verification failed or the page is stale."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="verify what is not verified yet")
    runs.add_argument("--steps", type=int, default=3)
    runs.add_argument("--again", action="store_true", help="also what has passed already")
    runs.add_argument("--most-ranks", type=int, default=40, help="leave larger plans for later")
    runs.add_argument("--only", default="", help="cases whose name has this text")
    runs.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after")
    table = verbs.add_parser("table", help="write the page")
    table.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if arguments.verb == "run":
        return _run(arguments)
    return put_page(PAGE, page(json.loads(RESULTS.read_text())), is_check=arguments.check)


def _run(arguments: argparse.Namespace) -> int:
    before = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else []
    cases = {case["name"]: case for case in before}
    made = header(arguments.steps)
    named = [_name(printed) for printed in (*printed_commands(), *printed_layouts())]
    cases = {name: cases[name] for name in named if name in cases}

    def write() -> None:
        kept = [cases[name] for name in named if name in cases]
        found = {"num_printed": len(named), "cases": kept}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")

    end_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        for printed, words in _cases(Path(folder)):
            name = _name(printed)
            # What was verified of a command counts as long as the command gives that plan.
            if name in cases and cases[name]["layout"] != printed.layout:
                del cases[name]
                write()
            is_done = name in cases and cases[name]["ok"] and not arguments.again
            is_large = _num_ranks(printed) > arguments.most_ranks
            if is_done or is_large or arguments.only not in name or time.monotonic() > end_s:
                continue
            case = cases[name] = verified(printed, words, made)
            write()
            verdict = "ok" if case["ok"] else "FAILED"
            print(f"{verdict:6} {case['seconds']:6.0f} s  {name}", flush=True)
    return 0 if all(case["ok"] for case in cases.values()) else 1


def _name(printed: Printed) -> str:
    return f"megatron-hetero {printed.command}" if printed.command else str(printed.layout)


def _num_ranks(printed: Printed) -> int:
    return parse_layout(str(printed.layout)).num_devices


def _cases(folder: Path) -> Iterator[tuple[Printed, list[str]]]:
    """Yield every layout, and the plan of every command as it is today, with the words by which
    `verify` is told."""
    for printed in printed_layouts():
        yield printed, ["--layout", str(printed.layout)]
    # A later command may need the plan of an earlier one.
    for printed in printed_commands():
        path, made = make_plan(printed, folder)
        yield replace(made, layout=format_layout(load_plan(path).layout)), [str(path)]


def verified(printed: Printed, words: list[str], made: dict[str, Any]) -> dict[str, Any]:
    """Verify one case in a process of its own: what was found, for the result file."""
    command = [sys.executable, "-m", "megatron_hetero", "verify", *words, "--json"]
    start_s = time.monotonic()
    done = subprocess.run(
        [*command, f"--steps={made['steps']}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return {
        "name": _name(printed),
        **made,
        "layout": printed.layout,
        "places": list(printed.places),
        "cut": printed.cut,
        "ranks": _num_ranks(printed),
        "ok": done.returncode == 0,
        "exit_code": done.returncode,
        "error": "" if done.returncode == 0 else done.stderr[-2000:],
        "left_out": [each["flag"] for each in found.get("flags", {}).get("left_out", ())],
        "seconds": round(time.monotonic() - start_s, 1),
        "runs": kept_runs(found),
    }


def page(data: dict[str, Any]) -> str:
    """Write the page of results."""
    cases = data["cases"]
    passed = sum(case["ok"] for case in cases)
    steps = " or ".join(sorted({str(case["steps"]) for case in cases}))
    left = data["num_printed"] - len(cases)
    lines = [
        "# Verified plans",
        "",
        "<!-- written by tools/verify_printed.py table -->",
        "",
        "`megatron-hetero verify` on the plans and layouts that README, these pages, the examples",
        f"and the stories print: {passed} of {len(cases)} pass"
        + (f", {left} are left to run." if left > 0 else ", and these are all.")
        + f" {when_and_where(cases)}, {steps} steps with each optimizer.",
        "Each number is the part of its bound that the worst of losses, gradients, norms and",
        "weights took (100 %: the bound). Of larger plans repeated nodes or replicas, and of many",
        "equal micro-batches some, are left out, as the last column says.",
        "",
        "```",
        "tools/verify_printed.py run",
        "```",
        "",
        "| plan | processes | Adam | SGD | | printed in | cut |",
        "| --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for case in cases:
        shown = f"`{case['name']}`".replace("|", "\\|")
        if case["name"] != case["layout"]:
            shown += f"<br>`{case['layout']}`".replace("|", "\\|")
        worst = [worst_part(case["runs"].get(optimizer)) for optimizer in ("adam", "sgd")]
        verdict = "equal" if case["ok"] else f"NO (exit {case['exit_code']})"
        if case["ok"] and case["left_out"]:
            verdict += f", but for {', '.join(case['left_out'])}"
        places = ", ".join(place.removeprefix("docs/") for place in case["places"])
        cells = (shown, str(case["ranks"]), *worst, verdict, places, case["cut"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
