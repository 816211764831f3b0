"""Rehearse plans whose replicas exchange gradients within the backward pass, divide the optimizer,
or both: how far predictions are off.

    python tools/bench rehearse-exchange > exchange.md

Four plans (two of unlike replicas, one of unlike widths, one that stock Megatron runs) on two of
the clusters of `rehearse`, each with three choices of flags.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import canonical_hosts, plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tools.bench.jobs import ROOT, quoted
from tools.bench.show import Columns, is_chosen, only

MODEL = "examples/rtx3080-rtx4090/gpt-1.3b.sh"
CASES = {
    "unlike depth": (
        "benchmarks/rehearsal/three-types.yaml",
        "tp2:24 @4 | tp1:10,tp2:14 @4",
    ),
    "unlike cuts": (
        "benchmarks/rehearsal/three-sites.yaml",
        "tp1:13,tp1:11 @4 | tp1:8,tp1:8,tp1:8 @4",
    ),
    "unlike widths": ("benchmarks/rehearsal/three-types.yaml", "tp2:24 @4 | tp1:24 @4"),
    "stock": (
        "benchmarks/rehearsal/three-types.yaml",
        "tp1:10,tp1:14 @4 | tp1:10,tp1:14 @4",
    ),
}
FLAGS = {
    "overlap": ("--overlap-grad-reduce",),
    "ZeRO-1": ("--use-distributed-optimizer",),
    "both": ("--overlap-grad-reduce", "--use-distributed-optimizer"),
}


def placed(cluster_file: str, layout: str, flags: tuple[str, ...]) -> tuple[Plan, Cluster]:
    """Place a layout on the GPUs of a cluster in the order of its file, perhaps not on all of
    them."""
    cluster = load_cluster(ROOT / cluster_file)
    shape = parse_layout(layout)
    batch = sum(replica.num_micro_batches for replica in shape.replicas)
    given = (f"--global-batch-size={batch}", "--micro-batch-size=1", *flags)
    plan = plan_from_layout(shape, load_workload(ROOT / MODEL, given))
    names = iter([device.name for device in cluster.devices])
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(s, devices=tuple(next(names) for _ in range(s.shape.tensor_parallel)))
                for s in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    hosts = canonical_hosts(replicas, cluster)
    made = replace(plan, replicas=replicas, hosts=hosts)
    for stage in (stage for replica in replicas for stage in replica.stages):
        if len({name.partition(":")[0] for name in stage.devices}) > 1:
            raise SystemExit(f"{layout}: {', '.join(stage.devices)} are on several nodes")
    return made, cluster


COLUMNS = "plan", "flags", "runs in", "predicted", "rehearsed", "error"


OPTIONS = (only("plans"),)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str] | str]:
    """Rehearse each plan with each choice of flags."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_hetero.runtime.job.local.loading import preload

    preload()
    from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse

    yield Columns.of(COLUMNS)
    errors = []
    for name, (cluster_file, layout) in CASES.items():
        if not is_chosen(name, given.only):
            continue
        for words, flags in FLAGS.items():
            plan, cluster = placed(cluster_file, layout, flags)
            with tempfile.TemporaryDirectory() as folder:
                found = rehearse(plan, cluster, None, RehearsalOptions(steps=1), Path(folder))
            errors.append(abs(found.error))
            runner = "stock" if found.is_stock else "plug-in"
            yield [
                f"{name} {quoted(layout)}", words, runner, f"{found.predicted.step_time_s:.3f} s",
                f"{found.step_time_s:.3f} s", f"{found.error:+.2%}",
            ]  # fmt: skip
    mean = sum(errors) / len(errors)
    yield f"{len(errors)} plans: mean error {mean:.2%}, worst {max(errors):.2%}"
