"""Steps of layers of real size on one card, beside what the catalogue prices, by cause.

    python tools/gpu_steps.py                       what was measured, beside today's prices
    python tools/gpu_steps.py --measure FILE [CASE ...]     on a machine with a card

Each case trains on one rank of the own runtime: the median of five steps, torch's peak of memory,
and the kernels of one step, as torch's profiler has them, the longest by name.
`benchmarks/tables/gpu-steps.json` holds what was measured, with card, versions and date.  Only
single kernels of it are used as prices (`mixed_bytes_per_s` of `cost/work/calibration.json`, made
by `make_calibration.py`); no step is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_cases import CASES

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import CHOICES, Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.causes import stage_causes
from megatron_hetero.cost.memory.libraries import torch_workspace_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.files import read_json, write_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.schedule.estimate import estimate_plan

TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "tables" / "gpu-steps.json"
STEPS, MICRO_BATCHES, NAMED = 5, 4, 60
LIMIT_S = 90.0

CAUSES: Mapping[str, str] = {
    "products": r"nvjet|gemm|cutlass|xmma|cublas",
    "attention": r"cudnn|flash|softmax",
    "mixed": r"CUDAFunctor_add<float>.*LoadWithCast|elementwise_kernel<128, 2.*<float, float",
    "update": r"multi_tensor|NormTwoOps|bfloat16_copy|FillFunctor<float>",
    "copies": r"^Mem(cpy|set)",
}
"""Kernels by cause, the first that fits; all others are memory-bound work of layers and ends."""
OTHER = "memory"


def cause_of(kernel: str) -> str:
    """Return the cause of a kernel, by its name."""
    found = (cause for cause, words in CAUSES.items() if re.search(words, kernel))
    return next(found, OTHER)


def layers_of(case: str) -> int:
    """Return the number of layers of a case."""
    return load_workload(None, CASES[case].split()).model.num_layers


def by_cause(kernels: Sequence[tuple[str, int, float]]) -> dict[str, list[float]]:
    """Sum kernels, given with launches and microseconds: cause -> launches and milliseconds."""
    found = {cause: [0, 0.0] for cause in (*CAUSES, OTHER)}
    for name, count, us in kernels:
        cause = cause_of(name)
        found[cause] = [found[cause][0] + count, round(found[cause][1] + us / 1e3, 3)]
    return found


def priced(case: str, measured: Mapping[str, Any], card: str) -> dict[str, float]:
    """Price a case by the catalogue: milliseconds of the step and of its causes, and MiB held."""
    gpu = gpu_type(card)
    workload = load_workload(None, [*CASES[case].split(), "--no-gradient-accumulation-fusion"])
    if measured["attention"] == "unfused":
        workload = replace(workload, training=replace(workload.training, flash_attention=False))
    node = Node("here", gpu, 1, "here", "localhost", Link(1e9, 1e-5))
    cluster = Cluster((node,), {}, Limits(memory_reserve_bytes=0, as_given=CHOICES))
    layout = parse_layout(f"tp1:{layers_of(case)} @{MICRO_BATCHES}")
    plan = place_in_order(plan_from_layout(layout, workload), cluster)
    estimates = estimate_plan(plan, cluster, None, bounded=False)
    costs = CostModel(cluster, workload, None)
    placement = placement_of(plan, cluster)
    rows = costs.vocab_rows(placement.widths)
    causes = stage_causes(costs, placement.replicas[0], 0, rows).times(1e3 * MICRO_BATCHES)
    held = estimates.devices["here:0"].tensor_bytes + torch_workspace_bytes(gpu)
    return {
        "step": 1e3 * estimates.step_time_s,
        "products": causes.products_s,
        "attention": causes.attention_s,
        "memory": 1e3 * estimates.step_time_s
        - causes.products_s
        - causes.attention_s
        - causes.launches_s,
        "held": held / 2**20,
    }


def show() -> None:
    """Print the table."""
    data = read_json(TABLE).data
    print(f"{data['card']}, {data['versions']}, {data['date']}\n")
    print(
        "| case | step | priced | GPU busy | priced for the GPU | | products | priced | attention "
        "| priced | memory-bound | priced | held | over the prediction |\n"
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n",
        end="",
    )
    for case, own in data["cases"].items():
        price = priced(case, own, data["card"])
        ms = {cause: total for cause, (_, total) in own["kernels"].items()}
        moved = sum(ms[cause] for cause in ("mixed", "update", OTHER))
        on_gpu = price["products"] + price["attention"] + price["memory"]
        print(
            f"| {case} | {own['step_ms']:.0f} ms | {price['step']:.0f} ms | {own['busy_ms']:.0f} ms"
            f" | {on_gpu:.0f} ms | {on_gpu / own['busy_ms'] - 1:+.1%} | {ms['products']:.1f} | "
            f"{price['products']:.1f} | {ms['attention']:.1f} | {price['attention']:.1f} | "
            f"{moved:.1f} | {price['memory']:.1f} | {own['held_mib']:,} MiB | "
            f"{own['held_mib'] / price['held'] - 1:+.1%} |"
        )


def measure(output: Path, cases: Sequence[str]) -> None:
    """Train cases on this machine's first card; `output` has after each what is known by then."""
    from megatron_hetero.lab.kit.small_job import on_this_backend, this_machine
    from megatron_hetero.runtime.job.local.jobs import LocalJob
    from megatron_hetero.runtime.job.local.launch import run_jobs
    from megatron_hetero.runtime.job.local.loading import preload

    machine = this_machine(None)
    preload()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "megatron-core", "transformer-engine")
    )
    data: dict[str, Any] = {
        "card": machine.gpu,
        "versions": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cases": {},
    }
    for case in cases:
        folder = output.parent / "gpu-steps" / re.sub(r"\W+", "-", case)
        flags = (*CASES[case].split(), *machine.flags_of("transformer_engine")[1:])
        job = LocalJob(case, 1, on_this_backend(_trainer(case, flags, folder)), folder)
        run_jobs([job], LIMIT_S)
        data["cases"][case] = json.loads((folder / "found.json").read_text())
        write_json(output, data)
        print(f"{case}: {data['cases'][case]['step_ms']:.1f} ms", flush=True)


def _trainer(case: str, flags: Sequence[str], folder: Path) -> Any:
    """Return the function of the rank."""

    def train(rank: int) -> None:
        import torch

        from megatron_hetero.lab.kit.small_job import TRAINING
        from megatron_hetero.plan.file import save_plan
        from megatron_hetero.runtime.job import entry
        from megatron_hetero.runtime.job.arguments import HeteroArguments
        from megatron_hetero.runtime.job.world import World
        from megatron_hetero.runtime.megatron import training_log
        from megatron_hetero.runtime.transformer_engine.attention import attention_kernel

        workload = load_workload(None, flags)
        plan = plan_from_layout(parse_layout(f"tp1:{layers_of(case)} @{MICRO_BATCHES}"))
        folder.mkdir(parents=True, exist_ok=True)
        save_plan(plan, folder / "plan.json")
        ends: list[float] = []
        found: dict[str, Any] = {}
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        profiler = torch.profiler.profile(activities=kinds)

        # Megatron's log calls at the end of every iteration.
        def seen(*given: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if len(ends) == 1:
                torch.cuda.reset_peak_memory_stats()
            # Two steps of warm-up, the timed ones, and one with the profiler.
            if len(ends) == STEPS + 2:
                steps = [b - a for a, b in pairwise(ends[1:])]
                found.update(
                    step_ms=round(1e3 * statistics.median(steps), 2),
                    held_mib=round(torch.cuda.max_memory_allocated() / 2**20),
                    attention=attention_kernel(workload.model),
                )
                profiler.start()
            elif len(ends) == STEPS + 3:
                profiler.stop()
                found.update(_read(profiler.events()))

        training_log.add_observer(seen)
        argv = (
            *workload.megatron_args,
            *TRAINING,
            f"--data-cache-path={folder / 'cache'}",
            f"--train-iters={STEPS + 4}",
        )
        arguments = HeteroArguments(None, folder / "plan.json", "layout-independent", argv)
        entry.train_asymmetric(plan, arguments, World.from_environment(), None)
        (folder / "found.json").write_text(json.dumps(found))

    return train


def _read(events: Any) -> dict[str, Any]:
    """Return a step's kernels by cause and the longest, the time with any on the GPU, and launches
    of the host."""
    from torch.autograd import DeviceType

    kernels: dict[str, list[float]] = {}
    spans = []
    # What the profiler calls an event of the GPU may be a range of the host that covers kernels.
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Optimizer."):
            one = kernels.setdefault(event.name, [0, 0.0])
            one[0] += 1
            one[1] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))
    busy, last = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    launches = sum("aunchKernel" in e.name for e in events if e.device_type == DeviceType.CPU)
    found = sorted(((k, int(n), us) for k, (n, us) in kernels.items()), key=lambda k: -k[2])
    return {
        "busy_ms": round(busy / 1e3, 2),
        "launches": launches,
        "kernels": by_cause(found),
        "longest": [[name[:160], n, round(us / 1e3, 3)] for name, n, us in found[:NAMED]],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", type=Path, metavar="FILE")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of --measure; all by default")
    given = parser.parse_args()
    if given.measure is None:
        show()
    else:
        measure(given.measure, given.cases or [*CASES])
