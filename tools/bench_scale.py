"""How long a plan takes, and how much memory, as the cluster grows.

    python tools/bench_scale.py [--sizes N ...] [--runs 3] [--verbs] [--write FOLDER] [--json]

Clusters are made up (`tools/scale_clusters.py`) and planned by `plan`'s default strategies, each
run in a process of its own on one core.  Times are processor seconds, medians of the runs; reading
the files counts, the start of Python and its imports do not.  `growth` is the exponent between two
sizes: 1 is time in proportion to GPUs.  `--verbs` also runs `validate`, `flags`, `explain` and
`simulate` on the plan, as a user would: their times are whole processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from math import log
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.cluster.file.description import load_cluster  # noqa: E402
from megatron_hetero.files import canonical_json  # noqa: E402
from megatron_hetero.model.load import load_workload  # noqa: E402
from megatron_hetero.plan.file import save_plan  # noqa: E402
from megatron_hetero.planner import plan_and_explain  # noqa: E402
from tools.scale_clusters import cluster_data, model_flags  # noqa: E402

SIZES = (64, 256, 1024, 10_240)
TITLES = ("GPUs", "CPU s", "growth", "MiB", "step s", "gap %", "placements priced", "plan MiB")
VERBS = ("validate", "flags", "explain", "simulate")


def write_case(num_gpus: int, folder: Path) -> tuple[Path, Path]:
    """Write cluster.yaml and model.flags of a size."""
    cluster, flags = folder / f"cluster-{num_gpus}.yaml", folder / f"model-{num_gpus}.flags"
    cluster.write_text(canonical_json(cluster_data(num_gpus)))  # JSON is YAML
    flags.write_text(model_flags(num_gpus))
    return cluster, flags


def run_once(cluster_path: Path, flags_path: Path, plan_path: Path) -> dict[str, Any]:
    """Read, plan and write once: times, memory, and what came out."""
    started = time.process_time()
    cluster = load_cluster(cluster_path)
    workload = load_workload(flags_path)
    read_s = time.process_time() - started
    plan, explanation = plan_and_explain(cluster, workload)
    search_s = time.process_time() - started - read_s
    save_plan(plan, plan_path)
    if plan.estimates is None:
        raise RuntimeError("the planner gives every plan estimates")
    return {
        "read_s": read_s,
        "search_s": search_s,
        "cpu_s": time.process_time() - started,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "step_time_s": plan.estimates.step_time_s,
        "gap": plan.estimates.gap,
        "num_priced": explanation.num_priced,
        "num_replicas": len(plan.replicas),
        "num_idle": len(plan.idle_devices),
        "strategy": plan.made_by.rpartition(" ")[2],
        "plan_mib": plan_path.stat().st_size / 2**20,
    }


def _run_in_child(paths: tuple[Path, Path, Path], pipe: Connection) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pipe.send(run_once(*paths))
    pipe.close()


def run_in_process(paths: tuple[Path, Path, Path]) -> dict[str, Any]:
    """`run_once` in a process of its own, on one core.

    Raises:
        RuntimeError: the process died.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_run_in_child, args=(paths, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise RuntimeError(f"{paths[0]}: its process died") from None
    finally:
        child.join()


def bench(num_gpus: int, runs: int, folder: Path, verbs: bool) -> dict[str, Any]:
    """Return the medians over the runs of one size.

    Raises:
        RuntimeError: two runs found different plans.
    """
    cluster, flags = write_case(num_gpus, folder)
    plan = folder / f"plan-{num_gpus}.json"
    found, contents = [], set()
    for _ in range(runs):
        found.append(run_in_process((cluster, flags, plan)))
        contents.add(plan.read_bytes())
    if len(contents) > 1:
        raise RuntimeError(f"{num_gpus} GPUs: equal inputs gave {len(contents)} plans")
    medians = {
        key: statistics.median(run[key] for run in found)
        for key in ("read_s", "search_s", "cpu_s", "peak_memory_mib")
    }
    result = {"num_gpus": num_gpus, **found[0], **medians, "runs": runs}
    if verbs:
        result["verbs_s"] = {verb: _verb_s(verb, cluster, plan) for verb in VERBS}
    return result


def _verb_s(verb: str, cluster: Path, plan: Path) -> float:
    command = [sys.executable, "-m", "megatron_hetero", verb, str(plan)]
    if verb != "flags":
        command += ["--cluster", str(cluster)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def growth(small: dict[str, Any], large: dict[str, Any]) -> float:
    """Return the exponent by which processor time grows with GPUs."""
    times = log(large["cpu_s"] / small["cpu_s"])
    return times / log(large["num_gpus"] / small["num_gpus"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--verbs", action="store_true", help=f"time {', '.join(VERBS)} as well")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="keep the files there")
    parser.add_argument("--json", action="store_true", help="a list of results, for programs")
    options = parser.parse_args(arguments)
    if not options.json:
        print("| " + " | ".join(TITLES) + " |\n|" + " --: |" * len(TITLES))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.write or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for num_gpus in options.sizes:
            result = bench(num_gpus, options.runs, folder, options.verbs)
            result["growth"] = growth(results[-1], result) if results else None
            results.append(result)
            if not options.json:
                print("\n".join(_lines(result)), flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0


def _lines(result: dict[str, Any]) -> list[str]:
    grows = "-" if result["growth"] is None else f"{result['growth']:.2f}"
    gap = "-" if result["gap"] is None else f"{100 * result['gap']:.1f}"
    cells = (
        *(f"{result['num_gpus']:,}", f"{result['cpu_s']:.1f}", grows),
        *(f"{result['peak_memory_mib']:.0f}", f"{result['step_time_s']:.3f}", gap),
        *(f"{result['num_priced']:,}", f"{result['plan_mib']:.2f}"),
    )
    lines = ["| " + " | ".join(cells) + " |"]
    if "verbs_s" in result:
        times = ", ".join(f"{verb} {seconds:.1f}" for verb, seconds in result["verbs_s"].items())
        lines.append(f"       processor seconds of verbs: {times}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
