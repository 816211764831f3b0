"""Scores predictions against public training runs, of which no constant is fitted.

    python tools/public_runs.py [--keep FOLDER]

Reads the tables in `benchmarks/public-runs` (its README has sources and licences), writes for each
run a cluster and a plan, and a RUNS.yaml, and prints what `tools/score_runs.py` finds.

Both trainers use PyTorch's FSDP: replicas of one stage with all layers sharded, which gather a
layer's weights for every pass.  `cause` says what they do otherwise than Megatron with Transformer
Engine, which the prediction is of.  They have links inside a machine by the sheet, of which NCCL
reaches a part (`tools/product_holdout.py`), and a network card of 200 or 400 Gb/s for each GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_hetero.cluster.catalogue import sheet_link
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.nvlink import nvlink_curve
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from tools.score_runs import Score, by_group, score, tables

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "public-runs"
_MOSAICML = (
    "FSDP of torch 1.13 and 2.0, mixed precision by autocast, norms, GELU, biases and dropout not "
    "fused, Triton flash attention"
)
_TORCHTITAN = "FSDP2, norms and SwiGLU not fused{}, recompute by operator, H100 of 500 W"
_MPT = shlex.split(
    "--attention-dropout=0 --hidden-dropout=0 --vocab-size=50368 "
    "--transformer-impl=transformer_engine"
)
_LLAMA = shlex.split(
    "--swiglu --group-query-attention --num-query-groups=8 --ffn-hidden-size=14336 "
    "--disable-bias-linear --normalization=RMSNorm --position-embedding-type=rope "
    "--untie-embeddings-and-output-weights --vocab-size=128256 --attention-dropout=0 "
    "--hidden-dropout=0"
)


@dataclass(frozen=True)
class PublicRun:
    """A row of a table: its job, its GPUs, and what was measured."""

    row: dict[str, str]
    source: str

    def number(self, name: str) -> int:
        """Return a number of the row."""
        return int(self.row[name])

    @property
    def name(self) -> str:
        """Return the run's name in the tables."""
        row = self.row
        compiled = ", compiled" if row.get("compiled") == "yes" else ""
        again = {"full": ", recompute", "selective": "", "none": ""}[row["recompute"]]
        return (
            f"{row['model']}, {row['gpus']} {row['gpu']}, {row['precision']}, sequences of "
            f"{self.number('sequence'):,}, {row['micro_batch']} x {row['micro_batches']}"
            f"{again}{compiled}"
        )

    @property
    def cause(self) -> str:
        """Say what the trainer does otherwise."""
        if self.source == "mosaicml":
            return _MOSAICML
        return _TORCHTITAN.format(" by hand but compiled" * (self.row["compiled"] == "yes"))

    @property
    def flags(self) -> list[str]:
        """Return the job as Megatron's flags."""
        row, size = self.row, self.number("micro_batch")
        batch = size * self.number("micro_batches") * self.number("gpus")
        given = [
            f"--num-layers={row['layers']}", f"--hidden-size={row['hidden']}",
            f"--num-attention-heads={row['heads']}", f"--seq-length={row['sequence']}",
            f"--max-position-embeddings={row['sequence']}", f"--micro-batch-size={size}",
            f"--global-batch-size={batch}", "--bf16", "--use-distributed-optimizer",
            *(_MPT if self.source == "mosaicml" else _LLAMA),
        ]  # fmt: skip
        if row["precision"] == "fp8":
            given += ["--fp8-format=e4m3", "--fp8-recipe=tensorwise"]
        if row["recompute"] == "full":
            given += ["--recompute-granularity=full", "--recompute-method=uniform"]
            given += ["--recompute-num-layers=1"]
        elif row["recompute"] == "selective":
            given += ["--recompute-granularity=selective"]
        return given

    @property
    def cluster(self) -> str:
        """Return cluster.yaml of whole machines of eight."""
        gpu, number = self.row["gpu"], self.number("gpus") // 8
        link, speed = sheet_link(gpu), 400 if gpu.startswith("H100") else 200
        # What large collectives reach of it, by tables that are no training runs.
        curve = nvlink_curve(gpu)
        inside = link.bytes_per_s * (curve.part_of_sheet if curve else 1.0)
        nodes = [{"name": f"n{i}", "gpu": gpu, "count": 8} for i in range(number)]
        links: dict[str, Any] = {
            "inside_node": {gpu: {"bandwidth": f"{inside / 1e9:.4g} GB/s", "latency": "5 us"}}
        }
        if number > 1:
            for node in nodes:
                node["nics"] = {"count": 8, "bandwidth": f"{speed} Gb/s"}
            links["between_nodes"] = {
                "main": {"bandwidth": f"{8 * speed} Gb/s", "latency": "10 us"}
            }
        return json.dumps({"version": 1, "nodes": nodes, "links": links})

    @property
    def layout(self) -> str:
        """Return a replica for each GPU, with all layers sharded."""
        layers = self.row["layers"]
        replica = f"tp1:{layers}z{layers} @{self.row['micro_batches']}"
        return " | ".join([replica] * self.number("gpus"))

    @property
    def step_s(self) -> float:
        """Return the measured seconds of a step."""
        batch = self.number("micro_batch") * self.number("micro_batches") * self.number("gpus")
        return batch * self.number("sequence") / self.number("tokens_per_s")


def public_runs() -> Iterator[PublicRun]:
    """Yield the runs of all tables."""
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield PublicRun(row, path.stem)


def write_runs(runs: Sequence[PublicRun], folder: Path) -> Path:
    """Write clusters, plans and RUNS.yaml; return the path of the last."""
    listed = []
    for number, run in enumerate(runs):
        cluster, plan = f"cluster-{number}.yaml", f"plan-{number}.json"
        (folder / cluster).write_text(run.cluster, encoding="utf-8")
        workload = load_workload(None, run.flags)
        bare = plan_from_layout(parse_layout(run.layout), workload)
        save_plan(place_in_order(bare, load_cluster(folder / cluster)), folder / plan)
        listed.append(
            {
                "name": run.name,
                "source": f"{run.source}.csv",
                "cluster": cluster,
                "plan": plan,
                "cause": run.cause,
                "measured": {"step_time_s": run.step_s},
            }
        )
    path = folder / "RUNS.yaml"
    path.write_text(json.dumps({"version": 1, "runs": listed}, indent=1), encoding="utf-8")
    return path


def summary(scores: Sequence[Score]) -> list[str]:
    """Return the table of errors by group, without single runs."""
    lines = list(tables(scores))
    return lines[max(i for i, line in enumerate(lines) if line == "") + 1 :]


def worst(scores: Sequence[Score], number: int = 5) -> Iterator[str]:
    """Yield the runs that are farthest off in each group of cards."""
    for (kind, value), own in by_group(scores).items():
        if kind == "card":
            for one in sorted(own, key=lambda s: -abs(s.error))[:number]:
                yield f"{value}: {one.run}: {one.error:+.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of groups, and the worst runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write all files there")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        scores = score(write_runs(list(public_runs()), folder))
    print("\n".join(summary(scores)))
    print()
    print("\n".join(worst(scores)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
