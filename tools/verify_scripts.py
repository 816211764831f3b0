"""Plan, print and verify the jobs of `tests/scripts`: flags as public training scripts give them.

    tools/verify_scripts.py run [--only TEXT] [--steps 3]   # minutes; writes the result file
    tools/verify_scripts.py table [--check]                 # writes docs/scripts.md

Each is planned on a mixed cluster, its Megatron flags are printed, and the job, shrunk, is trained
on an asymmetric layout beside one process.  `run` writes benchmarks/results/scripts-verified.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from verified_runs import header, kept_runs, put_page, when_and_where, worst_part

from megatron_hetero.errors import HeteroError
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import format_layout, parse_layout

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "scripts"
PAGE = ROOT / "docs" / "scripts.md"
RESULTS = ROOT / "benchmarks" / "results" / "scripts-verified.json"
TIMEOUT_S = 1500
LARGE = {"deepseek-v3-like": "large-cluster.yaml"}
"""Jobs that the cluster of the others cannot hold."""


def main() -> int:
    """Run the command line; the exit code is 1 if the page is stale."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="plan and verify")
    runs.add_argument("--steps", type=int, default=3)
    runs.add_argument("--only", default="", help="jobs whose name has this text")
    table = verbs.add_parser("table", help="write the page")
    table.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if arguments.verb == "run":
        _run(arguments)
        return 0
    return put_page(PAGE, page(json.loads(RESULTS.read_text())), is_check=arguments.check)


def scripts() -> list[Path]:
    """Return the files of flags, by name."""
    return sorted(FOLDER.glob("*.flags"))


def cluster_of(script: Path) -> Path:
    """Return the cluster on which a job is planned."""
    return FOLDER / LARGE.get(script.stem, "cluster.yaml")


def layout_of(num_layers: int) -> str:
    """Return the layout on which a job is verified: unlike depth, width and micro-batch counts."""
    upper = max(num_layers // 4, 1)
    return f"tp2:{num_layers - upper},tp1:{upper} @4 | tp1:{num_layers} @2"


def _run(arguments: argparse.Namespace) -> None:
    before = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else []
    cases = {case["name"]: case for case in before}
    for script in scripts():
        if arguments.only not in script.stem:
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = cases[script.stem] = found(script, Path(folder), arguments.steps)
        kept = [cases[s.stem] for s in scripts() if s.stem in cases]
        RESULTS.write_text(json.dumps({"cases": kept}, indent=1) + "\n")
        print(json.dumps({k: v for k, v in case.items() if k != "flags"}, indent=1), flush=True)


def found(script: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Return what happens to one job: read, planned, printed, verified."""
    start_s = time.monotonic()
    case: dict[str, Any] = {
        "name": script.stem,
        **header(steps),
        "error": "",
    }
    try:
        case["parameters"] = num_parameters(load_workload(script))
    except HeteroError as error:
        return case | {"error": str(error)}
    plan = folder / "plan.json"
    cluster = str(cluster_of(script))
    done = _verb("plan", "--cluster", cluster, "--model", str(script), "-o", str(plan))
    case["is_planned"] = done.returncode == 0
    if done.returncode:
        case["error"] = done.stderr[-2000:]
    else:
        made = load_plan(plan)
        case["layout"] = format_layout(made.layout)
        case["step_time_s"] = made.estimates.step_time_s if made.estimates else None
        printed = _verb("flags", str(plan))
        case["prints_flags"] = printed.returncode == 0
        case["error"] += printed.stderr[-2000:] if printed.returncode else ""
    verified = folder / "verified.json"
    case["verified_layout"] = verified_plan(script, verified)
    done = _verb("verify", str(verified), f"--steps={steps}", "--precision=fp32", "--json")
    data = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    case["is_equal"] = done.returncode == 0
    if done.returncode:
        case["error"] += done.stderr[-2000:] + str(data.get("error", ""))[:2000]
    case["left_out"] = [each["flag"] for each in data.get("flags", {}).get("left_out", ())]
    case["runs"] = kept_runs(data)
    case["seconds"] = round(time.monotonic() - start_s, 1)
    return case


def verified_plan(script: Path, path: Path) -> str:
    """Write the plan that is verified; return its layout."""
    workload = load_workload(script)
    layout = layout_of(workload.model.num_layers)
    training = replace(workload.training, global_batch_size=6)
    workload = replace(workload, training=training, megatron_args=_with_batch(workload))
    save_plan(plan_from_layout(parse_layout(layout), workload), path)
    return layout


def _with_batch(workload: Any) -> tuple[str, ...]:
    words = list(workload.megatron_args)
    words[words.index("--global-batch-size") + 1] = "6"
    return tuple(words)


def _verb(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_hetero", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def page(data: dict[str, Any]) -> str:
    """Write the page of results."""
    cases = data["cases"]
    planned = sum(case.get("is_planned", False) for case in cases)
    equal = sum(case.get("is_equal", False) for case in cases)
    lines = [
        "# Scripts that people train with",
        "",
        "<!-- written by tools/verify_scripts.py table -->",
        "",
        "Jobs with the flags that public scripts give (`tests/scripts`), each planned on a mixed",
        "cluster, printed as Megatron's flags, and, shrunk, trained on an asymmetric layout beside",
        f"one process: {planned} of {len(cases)} are planned, {equal} verify.",
        f"{when_and_where(cases)}.",
        "Of each verification the number is the part of its bound that the worst of losses,",
        "gradients, norms and weights took (100 %: the bound). What is left out is what a CPU",
        "cannot run: kernels, which round otherwise, and norms whose weights Megatron keeps around",
        "zero (`--apply-layernorm-1p`), which are the same norms under another weight decay.",
        "",
        "```",
        "tools/verify_scripts.py run",
        "```",
        "",
        "| job | parameters | planned | Adam | SGD | | left out on a CPU |",
        "| --- | ---: | --- | ---: | ---: | --- | --- |",
    ]
    for case in cases:
        params = f"{case['parameters'] / 1e9:.2f} B" if "parameters" in case else ""
        plan = summary(case["layout"]) if case.get("is_planned") else "no"
        runs = case.get("runs", {})
        worst = [worst_part(runs.get(optimizer)) for optimizer in ("adam", "sgd")]
        verdict = "equal" if case.get("is_equal") else f"no: {_reason(case)}"
        left = ", ".join(f"`{flag}`" for flag in case.get("left_out", ()))
        lines.append(f"| {' | '.join((case['name'], params, plan, *worst, verdict, left))} |")
    lines += [
        "",
        "The clusters are 16 A100 with 16 RTX 6000 Ada and, for DeepSeek-V3, 128 H200 with 128",
        "H100. SFT data are verified as documents of text, packed alike.",
        "",
        "Sizes of parallelism in a script (`--tensor-model-parallel-size`,",
        "`--expert-model-parallel-size` and their kind) are the plan's to decide and are not read.",
    ]
    return "\n".join(lines) + "\n"


def summary(line: str) -> str:
    """Say in a few words what a plan looks like."""
    layout = parse_layout(line)
    depths = sorted({len(replica.stages) for replica in layout.replicas})
    widths = " and ".join(map(str, layout.tensor_parallel_widths))
    replicas = len(layout.replicas)
    return (
        f"{layout.num_devices} GPUs: {replicas} {'replica' if replicas == 1 else 'replicas'} of "
        f"{' and '.join(map(str, depths))} stages, widths {widths}"
    )


def _reason(case: dict[str, Any]) -> str:
    lines = [line.strip() for line in case["error"].splitlines() if line.strip()]
    flags = [line for line in lines if line.startswith("--")]
    text = (flags or lines[-1:] or ["it differs"])[0]
    return text.replace("|", "\\|")[:160]


if __name__ == "__main__":
    sys.exit(main())
