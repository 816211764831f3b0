"""Verify random plans with all features beside one process, and list what came of each.

    tools/verify_random_plans.py run --plans 100 --seed 4501     # goes on where it ended before
    tools/verify_random_plans.py table [--check]                 # writes docs/random-plans.md

Each plan (`tests/runtime/job_generator.py`) goes through `verify` as a user's does. The plans are
sound, so one that differs from one process is an error of the runtime or a false alarm of `verify`,
and one whose process dies with a traceback should have been refused by name. `run` writes
benchmarks/results/random-plans.json after each plan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from verified_runs import ROOT, header, put_page

from megatron_hetero.errors import HeteroError

if TYPE_CHECKING:
    from tests.runtime.job_generator import Job

RESULTS = ROOT / "benchmarks" / "results" / "random-plans.json"
PAGE = ROOT / "docs" / "random-plans.md"
OUTCOMES = {
    "equal": "equal to one process",
    "refused": "refused by name",
    "unequal": "differs from one process",
    "died": "ends with an error",
}
"""Outcome -> what the page says of it."""
REFUSALS = (2, 4, 5)
"""Exit codes of an error that names what is refused."""


def verified(job: Job) -> dict[str, Any]:
    """Verify a job; return what came of it."""
    from megatron_hetero.lab.verify.run import outcome_to_data, verify

    with tempfile.TemporaryDirectory(prefix="megatron-hetero-random-") as folder:
        try:
            found = verify(job.plan, job.workload, job.options, Path(folder))
        except HeteroError as error:
            kind = "refused" if error.exit_code in REFUSALS else "died"
            return {"outcome": kind, "why": why(str(error))}
    if found.ok:
        return {"outcome": "equal"}
    return {"outcome": "unequal", "why": json.dumps(outcome_to_data(found)["runs"])}


def why(text: str) -> str:
    """Return the error of a text that may end with a rank's log: no lines before it, no paths."""
    lines = [line.strip() for line in text.splitlines()]
    first = next((n for n, line in enumerate(lines) if line.startswith("error:")), 0)
    return "\n".join(line for line in lines[first:] if not line.startswith(("/", "warnings.")))


def _run(plans: int, seed: int, only: frozenset[int], out: Path) -> None:
    # Ranks are forked, which CUDA does not survive.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_hetero.runtime.job.local.loading import preload
    from tests.runtime.job_generator import STEPS, jobs

    preload()
    # The commit of the code that is loaded, whatever is committed while plans are trained.
    now = header(STEPS)
    kept: dict[str, Any] = {"seed": seed, "plans": {}}
    if out.exists():
        kept = json.loads(out.read_text())
    if kept["seed"] != seed:
        sys.exit(f"{out} has plans of seed {kept['seed']}; give that seed or another --out")
    found: dict[str, Any] = kept["plans"]
    for job in islice(jobs(seed), plans):
        if (job.number not in only) if only else (str(job.number) in found):
            continue
        begin = time.process_time() + sum(os.times()[2:4])
        result = verified(job)
        seconds = time.process_time() + sum(os.times()[2:4]) - begin
        found[str(job.number)] = {
            "feature": job.feature,
            "layout": str(job.plan.layout),
            "ranks": job.plan.layout.num_devices,
            "values": dict(job.case.values),
            "commit": now["commit"],
            "date": now["date"],
            "seconds": round(seconds, 1),
            **result,
        }
        words = f"{job.number:3} {result['outcome']:8} {seconds:5.1f} s  {job.feature}"
        print(f"{words}  {job.plan.layout}", file=sys.stderr, flush=True)
        in_order = dict(sorted(found.items(), key=lambda item: int(item[0])))
        document = {"seed": seed, "machine": now["machine"], "steps": STEPS, "plans": in_order}
        out.write_text(json.dumps(document, indent=1) + "\n")


def page(results: Mapping[str, Any]) -> str:
    """Return the page of the results."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    plans = results["plans"].values()
    counts = Counter(plan["outcome"] for plan in plans)
    commits = ", ".join(sorted({plan["commit"][:8] for plan in plans}))
    dates = sorted({plan["date"] for plan in plans})
    yield "# Random plans, verified beside one process"
    yield ""
    yield (
        "Each plan and job is drawn (`tests/runtime/job_generator.py`): replicas, stages, widths, "
        "shares, orders, models and optimizers at random, and one feature more in turn. "
        "`megatron-hetero verify` trains each, small, beside one process of stock Megatron. All "
        "are sound, so a difference would be an error of the runtime or a false alarm, and an "
        "error without a name a missing refusal."
    )
    yield ""
    yield (
        f"**{counts['equal']} of {len(plans)} are equal to one process, {counts['refused']} are "
        f"refused by name, {counts['unequal']} differ, {counts['died']} end with an error.** "
        f"`tools/verify_random_plans.py run --plans {len(plans)} --seed {results['seed']}`, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {commits}, "
        f"{results['machine']}, {results['steps']} steps. This page is written by "
        "`tools/verify_random_plans.py table`."
    )
    yield from ("", "| feature | equal | refused by name | differ | end with an error |")
    yield "| --- | --: | --: | --: | --: |"
    for feature in dict.fromkeys(plan["feature"] for plan in plans):
        of_it = Counter(plan["outcome"] for plan in plans if plan["feature"] == feature)
        yield f"| {feature} | {' | '.join(str(of_it[outcome]) for outcome in OUTCOMES)} |"
    others = [(n, plan) for n, plan in results["plans"].items() if plan["outcome"] != "equal"]
    if others:
        yield from ("", "| | plan | feature | what came of it |", "| --: | --- | --- | --- |")
    for number, plan in others:
        words = " ".join(plan["why"].split()).replace("|", "\\|")[:300]
        layout = plan["layout"].replace("|", "\\|")
        yield (
            f"| {number} | `{layout}` | {plan['feature']} | {OUTCOMES[plan['outcome']]}: {words} |"
        )


def main() -> int:
    """Run the command line; the exit code is 1 if the page is stale, or a plan was not equal and
    not refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="verify the plans without a result")
    runs.add_argument("--plans", type=int, default=100, help="how many plans (default: 100)")
    runs.add_argument("--seed", type=int, required=True, help="of the generator")
    runs.add_argument("--only", type=int, nargs="*", default=(), help="numbers to verify again")
    runs.add_argument("--out", type=Path, default=RESULTS, help="result file")
    table = verbs.add_parser("table", help="write the page")
    table.add_argument("--check", action="store_true", help="compare instead of writing")
    asked = parser.parse_args()
    if asked.verb == "run":
        _run(asked.plans, asked.seed, frozenset(asked.only), asked.out)
        plans = json.loads(asked.out.read_text(encoding="utf-8"))["plans"].values()
        return 0 if all(plan["outcome"] in ("equal", "refused") for plan in plans) else 1
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    return put_page(PAGE, text, is_check=asked.check)


if __name__ == "__main__":
    sys.exit(main())
