"""Beside the search of stock Megatron's best plan: plain enumeration of its settings.

    python tools/enumerate_stock.py [--only JOB ...]

Prints a row for each of twelve jobs, with the steps of the search and of the enumeration
(`tools/stock_space.py`) and their ratio; fails where the enumeration is faster by more than the
search's tolerance.

Then a row for each of four jobs whose row of stock Megatron was once false, as the command `plan`
says it: its own plan, the best of stock Megatron beside it, and what people do by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import HeteroError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.limits import limits_beside_a_plan
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.stock_space import chunked, plans  # noqa: E402

NUM_FORMS, NUM_OF_FORM = 12, 4
"""Grids with their forms that are looked at closely, and plans of each."""
_FAR = 2.0
"""Prices of the plug-in so many times the least are not stock's best."""
_LINKS = {"H100-80GB": "360 GB/s", "B200": "700 GB/s", "A100-80GB": "240 GB/s"}
_COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --calculate-per-token-loss "
    "--untie-embeddings-and-output-weights --sequence-parallel --use-distributed-optimizer "
    "--group-query-attention"
)
_MODELS = {
    "llama-1b": "16 2048 8192 32 8 64 128256",
    "llama-8b": "32 4096 14336 32 8 128 128256",
    "qwen-30b-a3b": "48 2048 6144 32 4 128 151936 128 8 768",
    "mixtral-8x7b": "32 4096 14336 32 8 128 32000 8 2 14336",
    "glm-4.5-air": "46 4096 10944 96 8 128 151552 128 8 1408 1408",
}
"""Layers, hidden, FFN, heads, query groups, head size, vocabulary; experts, top-k, columns of each,
of the shared one."""
_H, _A, _B = ("H100-80GB", 8), ("A100-80GB", 8), ("B200", 4)
_HALF_H, _HALF_A = ("H100-80GB", 4), ("A100-80GB", 4)
JOBS: dict[str, tuple[str, Sequence[tuple[str, int]], int, int]] = {
    # The four cases that were wrong.
    "llama-1b, 131,072 tokens, 2 x 4 H100": ("llama-1b", [_HALF_H] * 2, 131072, 32),
    "qwen-30b-a3b, 4 B200 + 4 H100": ("qwen-30b-a3b", [_B, _HALF_H], 4096, 64),
    "glm-4.5-air, 16 H100 + 16 A100": ("glm-4.5-air", [_H, _H, _A, _A], 4096, 128),
    "mixtral-8x7b, 16 H100 + 16 A100": ("mixtral-8x7b", [_H, _H, _A, _A], 4096, 128),
    # Twelve others.
    "llama-8b, 8 H100": ("llama-8b", [_H], 4096, 64),
    "llama-8b, 4 H100 + 4 A100": ("llama-8b", [_HALF_H, _HALF_A], 4096, 64),
    "llama-8b, 32,768 tokens, 8 H100": ("llama-8b", [_H], 32768, 16),
    "llama-8b, 32,768 tokens, 8 H100 + 8 A100": ("llama-8b", [_H, _A], 32768, 16),
    "llama-8b, 131,072 tokens, 16 H100": ("llama-8b", [_H, _H], 131072, 16),
    "llama-8b, 131,072 tokens, 64 H100": ("llama-8b", [_H] * 8, 131072, 16),
    "qwen-30b-a3b, 8 H100": ("qwen-30b-a3b", [_H], 4096, 64),
    "qwen-30b-a3b, 4 H100 + 4 A100": ("qwen-30b-a3b", [_HALF_H, _HALF_A], 4096, 16),
    "mixtral-8x7b, 8 B200": ("mixtral-8x7b", [("B200", 8)], 4096, 32),
    "mixtral-8x7b, 4 B200 + 4 H100": ("mixtral-8x7b", [_B, _HALF_H], 4096, 16),
    "mixtral-8x7b, 16 H100": ("mixtral-8x7b", [_H, _H], 4096, 16),
    "mixtral-8x7b, 32 H100": ("mixtral-8x7b", [_H] * 4, 4096, 32),
}


NUM_CASES = 4
"""The first jobs are those whose row was false."""


def cluster_text(name: str) -> str:
    """Write a job's cluster file."""
    _, machines, _, _ = JOBS[name]
    nodes = "".join(
        f"  - {{name: n{i:02d}, gpu: {gpu}, count: {count}, site: a}}\n"
        for i, (gpu, count) in enumerate(machines)
    )
    inside = "".join(
        f"    {gpu}: {{bandwidth: {_LINKS[gpu]}, latency: 5 us}}\n"
        for gpu in sorted({gpu for gpu, _ in machines})
    )
    text = f"version: 1\nnodes:\n{nodes}links:\n  inside_node:\n{inside}"
    if len(machines) > 1:
        text += "  between_nodes:\n    a: {bandwidth: 400 Gb/s, latency: 10 us}\n"
    return text


def job_flags(name: str) -> list[str]:
    """Return a job's flags for Megatron."""
    model, _, seq_length, batch = JOBS[name]
    sizes = _MODELS[model].split()
    names = (
        *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"),
        *("num-query-groups", "kv-channels", "vocab-size", "num-experts", "moe-router-topk"),
        *("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"),
    )
    words = [w for n, size in zip(names, sizes, strict=False) for w in (f"--{n}", size)]
    for flag, value in (
        ("seq-length", seq_length),
        ("max-position-embeddings", seq_length),
        ("global-batch-size", batch),
        ("micro-batch-size", 1),
    ):
        words += [f"--{flag}", str(value)]
    if len(sizes) > 7:
        words.append("--moe-grouped-gemm")
    return [*words, *_COMMON.split()]


def job(name: str) -> tuple[Cluster, Workload]:
    """Return a job's cluster and workload."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_text(name))
        cluster = load_cluster(path)
    return cluster, load_workload(None, tuple(job_flags(name)))


def simulated(plan: Plan, cluster: Cluster) -> float:
    """Return the step as stock Megatron runs it; infinite where the plan does not fit."""
    try:
        step = simulate_plan(plan, cluster, is_stock=True)
    except HeteroError:
        return float("inf")
    if any(peak > s.capacity_bytes for s in step.timelines for peak in s.device_peak_bytes):
        return float("inf")
    return step.step_time_s


def enumerated(cluster: Cluster, workload: Workload) -> tuple[float, str, int]:
    """Return the best simulated step, its layout, and how many plans were priced.

    The cost model prices exchanges as the plug-in does them, so its order counts only among plans
    of one grid and one form: the best of each is simulated, and of the best grids and forms more.
    """
    number = 0
    groups: dict[tuple[object, ...], list[tuple[float, Plan]]] = {}
    for price_s, plan in plans(cluster, workload):
        number += 1
        first = plan.replicas[0].stages
        shape = replace(first[0].shape, num_layers=1)
        training = plan.workload.training if plan.workload else workload.training
        key = (
            *(len(plan.replicas), len(first), shape, plan.hosts, training.token_dispatcher),
            first[0].devices,
        )
        own = groups.setdefault(key, [])
        own.append((price_s, plan))
        own.sort(key=lambda entry: entry[0])
        del own[NUM_OF_FORM:]
    least_s = min((own[0][0] for own in groups.values()), default=0.0)
    ranked = sorted(
        (
            (simulated(own[0][1], cluster), index, own)
            for index, own in enumerate(groups.values())
            if own[0][0] <= _FAR * least_s
        ),
        key=lambda entry: entry[:2],
    )
    best_s, best = float("inf"), ""
    for _, _, own in ranked[:NUM_FORMS]:
        for _, plan in own:
            for made in chunked(plan):
                step_s = simulated(made, cluster)
                if step_s < best_s and is_stock(made):
                    best_s, best = step_s, str(made.layout)
    return best_s, best, number


def _folded(layout: str) -> str:
    """Write a layout's first replica, and how many it has."""
    replicas = layout.split(" | ")
    return f"{replicas[0]} x{len(replicas)}"


def plan_row(name: str) -> list[str]:
    """Return what the command `plan` says of a job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_text(name))
        command = [sys.executable, "-m", "megatron_hetero", "plan", "--json", "--cluster"]
        done = subprocess.run(
            [*command, str(path), "--", *job_flags(name)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    said = json.loads(done.stdout)
    stock = said["best_stock"]
    by_hand = {found["strategy"]: f"{100 * found['slower_by']:+.1f}" for found in said["by_hand"]}
    step_s = said["step_time_s"]
    return [
        *(name, f"{step_s:.4f}", f"`{_folded(said['layout'])}`"),
        "-" if stock is None else f"{stock['step_time_s']:.4f}",
        "-" if stock is None else f"{100 * stock['slower_by']:+.1f}",
        "-" if stock is None else f"`{_folded(stock['layout'])}`",
        "-" if stock is None else stock["settings"] or "-",
        by_hand.get("by hand: equal layers, all GPUs", "-"),
        by_hand.get("by hand: without the slower cards", "-"),
    ]


def compared(name: str) -> tuple[list[str], bool]:
    """Return the row of a job, and whether the search is no slower than the enumeration."""
    cluster, workload = job(name)
    start = time.process_time()
    limits = limits_beside_a_plan(len(cluster.devices))
    found = best_stock_plan(make_problem(cluster, workload), limits)
    took_s = time.process_time() - start
    best_s, layout, number = enumerated(cluster, workload)
    own_s = float("inf") if found is None else found.step_time_s
    ratio = own_s / best_s
    layouts = ("" if found is None else str(found.plan.layout), layout)
    cells = [
        *(name, f"{own_s:.4f}", f"{took_s:.2f}", f"{best_s:.4f}", f"{number:,}"),
        *(f"{ratio:.4f}", *(f"`{_folded(one)}`" for one in layouts)),
    ]
    return cells, ratio <= 1 + 2 * limits.tolerance


def main() -> int:
    """Compare the jobs that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=list(JOBS))
    names = parser.parse_args().only or list(JOBS)
    cases = [name for name in list(JOBS)[:NUM_CASES] if name in names]
    failed = 0
    print("| job | search s | CPU s | enumeration s | plans | ratio | search | enumeration |")
    print("| --- | --: | --: | --: | --: | --: | --- | --- |")
    for name in list(JOBS)[NUM_CASES:]:
        if name in names:
            cells, is_equal = compared(name)
            failed += not is_equal
            print(f"| {' | '.join(cells)} |", flush=True)
    titles = (
        *("job", "plan s", "plan", "best of stock s", "more %", "best of stock", "settings"),
        *("by hand, all GPUs, more %", "by hand, fast GPUs, more %"),
    )
    print(f"\n| {' | '.join(titles)} |")
    print("| --- | --: | --- | --: | --: | --- | --- | --: | --: |")
    for name in cases:
        print(f"| {' | '.join(plan_row(name))} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
