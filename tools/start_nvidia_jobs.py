"""Start the job files of NVIDIA's own tree under an asymmetric plan, small, beside one process.

    git clone https://github.com/NVIDIA/Megatron-LM
    python tools/start_nvidia_jobs.py run Megatron-LM      # an hour; each kind of job once
    python tools/start_nvidia_jobs.py table [--check]      # writes docs/nvidia-jobs.md

Every job file that no flag stops (`tools/nvidia_jobs.py`) is shrunk as `verify` shrinks a job, with
the flags that the file has, and trained for a few steps on three CPU processes under the plan of
`LAYOUT`, and beside them by one process of stock Megatron. Files whose small jobs have the same
arguments are started once. `run` writes benchmarks/results/nvidia-jobs.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from nvidia_jobs import Judged, arguments_of, job_files, judge
from verified_runs import put_page

from megatron_hetero.errors import HeteroError
from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.lab.verify.command import default_flags
from megatron_hetero.model.arguments import PLAN_FLAGS
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-jobs.json"
PAGE = ROOT / "docs" / "nvidia-jobs.md"
LAYOUT = "tp2:{lower},tp1:{upper} @2"
"""Two unlike stages on three ranks, which no flags of stock Megatron describe."""
_SIZES = ("--num-layers", "--encoder-num-layers")
FAULTS = ("--error-injection-rate", "--error-injection-type")
"""Flags that make faults; a job file that has them is started without."""
STEPS = 2
MARKS = (
    "same_samples", "same_norm_bits_on_all_ranks", "same_random_states_in_groups",
    "own_random_states_of_regions", "same_loss_scales", "unequal_initial_weights",
    "unlike_distribution_of_initial_weights", "unequal_holders", "unlike_log",
)  # fmt: skip
"""What a verification says of a run beside its distances."""


@dataclass(frozen=True)
class Small:
    """A job file with the plan under which it is started; `key` is alike for alike small jobs."""

    path: Path
    plan: Plan
    workload: Workload
    key: str


def megatron_flags(text: str) -> tuple[str, ...]:
    """Return the Megatron flags in a job file but those that divide the job, which the plan does.

    Raises:
        UsageError: Megatron would not read them.
    """
    table = flag_table()
    argv = [word.replace("${REPEAT}", "1") for word in arguments_of(text)]
    kept: list[str] = []
    for option in last_of_each(table.split(table.known_part(argv))):
        if option.name in FAULTS:
            continue
        is_plans = support_of(option.flag).status == "the plan's" or option.name in PLAN_FLAGS
        if not is_plans or option.flag.names[0] in _SIZES or option.name in _SIZES:
            kept += (option.name, *option.values)
    return tuple(kept)


def small_job(path: Path, name: str) -> Small:
    """Return a job file as the small job that is started.

    Raises:
        HeteroError: a flag or a size of the file is refused; the message says which.
    """
    from megatron_hetero.lab.verify.small.job_flags import job_flags
    from megatron_hetero.lab.verify.small.shrink import shrink

    flags = megatron_flags(path.read_text(encoding="utf-8"))
    given = {option.flag.names[0]: option.values for option in flag_table().split(flags)}
    num_layers = int(given.get("--num-layers", ("12",))[0])
    upper = max(num_layers // 4, 1)
    layout = parse_layout(LAYOUT.format(lower=max(num_layers - upper, 1), upper=upper))
    workload = load_workload(None, (*default_flags(layout), *flags), is_planned=False)
    plan = plan_from_layout(layout, workload)
    shrunk = shrink(plan, workload)
    treated = job_flags(plan, workload, shrunk, STEPS)
    training = workload.training
    parts = (treated.both, treated.half, treated.plan, treated.learning_rates, shrunk.model_args)
    key = repr((*parts, shrunk.plan_args, training.optimizer, training.precision, layout))
    return Small(Path(name), plan, workload, key)


def start(job: Small) -> dict[str, Any]:
    """Train a small job on its plan and beside one process; return what happened."""
    from megatron_hetero.lab.verify.options import Options
    from megatron_hetero.lab.verify.run import outcome_to_data, verify
    from megatron_hetero.lab.verify.small.architecture import balances_by_choice

    training = job.workload.training
    # Choices of sinkhorn cannot be held alike in half precision.
    has_routes = job.workload.model.num_experts > 0 and balances_by_choice(job.workload)
    precision = "fp32" if has_routes else training.precision
    options = Options(STEPS, (training.optimizer,), precision=precision, limit_s=300.0)
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-nvidia-") as folder:
        try:
            found = verify(job.plan, job.workload, options, Path(folder))
        except HeteroError as error:
            kind = "refused" if error.exit_code in (2, 4, 5) else "died"
            return {"outcome": kind, "why": str(error)}
    left_out = [flag for flag, _ in found.flags.left_out]
    if found.ok:
        return {"outcome": "equal", "left_out": left_out}
    run = outcome_to_data(found)["runs"][training.optimizer]
    unlike = [
        f"{key} {run[key]:.1e}, allowed {allowed:.1e}, {run['worst'][key]}"
        for key, allowed in run["tolerance"].items()
        if not run[key] <= allowed
    ]
    unlike += [f"{key}: {run[key]}" for key in MARKS if run[key] not in (True, None)]
    return {"outcome": "unequal", "left_out": left_out, "why": "; ".join(unlike)}


def _run(tree: Path, only: str, out: Path) -> None:
    from megatron_hetero.runtime.job.local.loading import preload
    from megatron_hetero.runtime.transformer_engine import layers

    # Ranks are forked, which CUDA does not survive.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    reason = layers.provide()
    if reason is not None:
        sys.exit(f"no Transformer Engine on this CPU: {reason}")
    preload()
    # Judge every file, and keep one of those whose small jobs are alike.
    files: dict[str, dict[str, Any]] = {}
    jobs: dict[str, Small] = {}
    keys: dict[str, str] = {}
    when = _when(tree)
    again: dict[str, str] = {}
    if out.exists() and only:
        before = json.loads(out.read_text(encoding="utf-8"))
        if before["megatron"] != when["megatron"] or before["steps"] != when["steps"]:
            sys.exit(f"{out} is of another tree or number of steps; run all files")
        files = before.pop("files")
        again, when = {"commit": when["commit"]}, before
    for path in job_files(tree):
        name = str(path.parent.relative_to(tree / "tests" / "functional_tests" / "test_cases"))
        if only not in name:
            continue
        files[name] = _of_table(judge(path))
        if files[name]["outcome"] != "free":
            continue
        try:
            job = small_job(path, name)
        except HeteroError as error:
            files[name] = {"outcome": "refused", "why": str(error)}
            continue
        jobs.setdefault(job.key, job)
        keys[name] = job.key
    print(f"{len(keys)} files to start, {len(jobs)} unlike", file=sys.stderr, flush=True)
    # Start them, and keep what was found after each: the whole takes long.
    found: dict[str, dict[str, Any]] = {}
    for job in jobs.values():
        found[job.key] = start(job)
        print(f"{found[job.key]['outcome']:8} {job.path}", file=sys.stderr, flush=True)
        for name, key in keys.items():
            if key in found:
                files[name] = {**found[key], "as": str(jobs[key].path), **again}
        out.write_text(json.dumps({**when, "files": files}, indent=1) + "\n")


def _of_table(judged: Judged) -> dict[str, Any]:
    if judged.unreadable:
        return {"outcome": "unreadable", "why": judged.unreadable}
    if judged.refused:
        why, reasons = ", ".join(judged.refused), sorted(judged.reasons)
        return {"outcome": "stopped", "why": why, "reasons": reasons}
    return {"outcome": "free"}


def _when(tree: Path) -> dict[str, Any]:
    return {
        "megatron": _commit(tree),
        "commit": _commit(ROOT),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "steps": STEPS,
        "layout": LAYOUT,
    }


def _commit(tree: Path) -> str:
    """Return the commit of a clone; an unpacked archive has none."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


OUTCOMES = {
    "equal": "start, and train as one process does",
    "unequal": "start, and differ from one process",
    "died": "end with an error",
    "refused": "refused by name at the start",
    "stopped": "refused by name, by a flag",
    "unreadable": "not arguments of Megatron's parser",
    "free": "stopped by no flag, not started for this page",
}
"""Outcome -> what a table says of it."""


def page(results: Mapping[str, Any]) -> str:
    """Return the page of the results."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    files = results["files"]
    counts = Counter(file["outcome"] for file in files.values())
    started = counts["equal"] + counts["unequal"]
    yield "# NVIDIA's own job files on an asymmetric plan"
    yield ""
    yield (
        "Every `model_config.yaml` of a GPT-like model in the functional tests of "
        f"Megatron-LM (commit {results['megatron'][:8]}) is judged by its flags, and what no flag "
        "stops is started: shrunk as `megatron-hetero verify` shrinks a job, with the file's own "
        f"flags, optimizer and precision, under the plan `{results['layout']}` on three CPU "
        f"processes, for {results['steps']} steps, beside one process of stock Megatron. Files "
        "whose small jobs have the same arguments are started once "
        f"({len({f['as'] for f in files.values() if 'as' in f})} jobs)."
    )
    yield ""
    yield (
        f"**{started} of {len(files)} start ({100 * started / len(files):.0f} %)**, "
        f"{counts['equal']} of them equal to one process. `tools/start_nvidia_jobs.py run`, "
        f"{results['date']}, commit {results['commit'][:8]}, {results['machine']}. This page is "
        "written by `tools/start_nvidia_jobs.py table`."
    )
    again = Counter(file["commit"][:8] for file in files.values() if "commit" in file)
    for commit, count in again.items():
        yield ""
        yield f"{count} of these files were run again at commit {commit} (`--only`)."
    yield from ("", "| outcome | files |", "| --- | --: |")
    for outcome, words in OUTCOMES.items():
        if counts[outcome]:
            yield f"| {words} | {counts[outcome]} |"
    reasons = Counter(r for f in files.values() for r in f.get("reasons", ()))
    yield from ("", "| reason of a refusal by a flag | files |", "| --- | --: |")
    for reason, count in reasons.most_common():
        yield f"| {reason} | {count} |"
    left_out = Counter(flag for f in files.values() for flag in f.get("left_out", ()))
    yield ""
    yield (
        "A CPU has none of what these flags ask for, so the small jobs run without them (files): "
        + ", ".join(f"`{flag}` ({count})" for flag, count in left_out.most_common())
        + "."
    )
    yield from ("", "| not started | why |", "| --- | --- |")
    for name, file in files.items():
        if file["outcome"] not in ("equal",):
            why = " ".join(str(file.get("why", OUTCOMES[file["outcome"]])).split())
            yield f"| {name} | {why.replace('|', chr(92) + '|')[:300]} |"


def main() -> int:
    """Run the command line; the exit code is 1 if the page is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="start the job files")
    runs.add_argument("tree", type=Path, help="a clone of Megatron-LM")
    runs.add_argument("--only", default="", help="files whose name has this text")
    runs.add_argument("--out", type=Path, default=RESULTS, help="result file")
    table = verbs.add_parser("table", help="write the page")
    table.add_argument("--check", action="store_true", help="compare instead of writing")
    asked = parser.parse_args()
    if asked.verb == "run":
        _run(asked.tree, asked.only, asked.out)
        return 0
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    return put_page(PAGE, text, is_check=asked.check)


if __name__ == "__main__":
    sys.exit(main())
