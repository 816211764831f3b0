"""Clusters and models that several benchmarks plan, and what they ask of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from tools.bench.show import is_chosen

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(
    ROOT / name
    for name in (
        "examples/a100-rtx4090",
        "examples/lost-node",
        "examples/one-odd-gpu",
        "examples/rtx3080-rtx4090",
        "examples/two-sites",
        "benchmarks/settings/case-study-13b",
    )
)
CLUSTERS = {
    "A100 + 4 RTX 4090": ("examples/a100-rtx4090/cluster.yaml", "7b"),
    "2 RTX 3080 + 2 RTX 4090": ("examples/rtx3080-rtx4090/cluster.yaml", "1.3b"),
    "H100 + 4 A10": ("benchmarks/rehearsal/h100-a10.yaml", "5b"),
    "3 sites of 2 A100": ("benchmarks/rehearsal/three-sites.yaml", "1.3b"),
    "2 RTX 3090 + A6000 + 2 L4": ("benchmarks/rehearsal/three-types.yaml", "1.3b"),
    "8 RTX 3090 + 2 A100": ("benchmarks/rehearsal/eight-and-two.yaml", "7b"),
    "3 A6000 + RTX 4090": ("benchmarks/rehearsal/three-and-one.yaml", "5b"),
    "2 sites of 4 H100": ("benchmarks/rehearsal/two-sites.yaml", "26b"),
    "H100 + 4 desktops": ("benchmarks/rehearsal/office.yaml", "1.3b, large batch"),
    "2 offices": ("benchmarks/rehearsal/two-offices.yaml", "2.7b"),
    "3 lab workstations": ("benchmarks/rehearsal/lab-workstations.yaml", "1.3b, 1M tokens"),
    "4 labs": ("benchmarks/rehearsal/four-labs.yaml", "2.7b, 1M tokens"),
    "A department": ("benchmarks/rehearsal/department.yaml", "6.7b, 2M tokens"),
}
"""Clusters to rehearse: the file and the name of the model."""
_2_7B = (
    "--num-layers=32", "--hidden-size=2560", "--num-attention-heads=32",
    "--seq-length=2048", "--max-position-embeddings=2048",
)  # fmt: skip
MODELS = {
    "7b": ("examples/a100-rtx4090/gpt-7b.sh", ("--global-batch-size=16",)),
    "5b": ("examples/a100-rtx4090/gpt-7b.sh", ("--global-batch-size=16", "--num-layers=24")),
    "1.3b": ("examples/rtx3080-rtx4090/gpt-1.3b.sh", ("--global-batch-size=24",)),
    "1.3b, large batch": ("examples/rtx3080-rtx4090/gpt-1.3b.sh", ("--global-batch-size=512",)),
    "2.7b": ("examples/rtx3080-rtx4090/gpt-1.3b.sh", ("--global-batch-size=64", *_2_7B)),
    # With sequences of 2048 tokens and the batches of GPT-3's models of these sizes (Brown et al.
    # 2020, table 2.1).
    "1.3b, 1M tokens": (
        "examples/rtx3080-rtx4090/gpt-1.3b.sh",
        ("--global-batch-size=512", "--seq-length=2048", "--max-position-embeddings=2048"),
    ),
    "2.7b, 1M tokens": (
        "examples/rtx3080-rtx4090/gpt-1.3b.sh", ("--global-batch-size=512", *_2_7B)
    ),
    "6.7b, 2M tokens": (
        "examples/a100-rtx4090/gpt-7b.sh",
        ("--global-batch-size=1024", "--seq-length=2048", "--max-position-embeddings=2048"),
    ),
    "26b": (
        "examples/a100-rtx4090/gpt-7b.sh",
        (
            "--global-batch-size=64", "--num-layers=48", "--hidden-size=6656",
            "--ffn-hidden-size=17920", "--num-attention-heads=52", "--seq-length=2048",
        ),
    ),
}  # fmt: skip
_THREE_GPUS = ("--seq-length=2048", "--micro-batch-size=1", "--global-batch-size=32")
_64_GPUS = (
    "--num-layers=48", "--hidden-size=6144", "--ffn-hidden-size=16384",
    "--num-attention-heads=48", "--global-batch-size=256",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A cluster and a model, with flags beside its file."""

    name: str
    cluster: Path
    model: Path
    flags: tuple[str, ...] = ()

    def load(self) -> tuple[Cluster, Workload]:
        """Read both files."""
        return load_cluster(self.cluster), load_workload(self.model, self.flags)


def files_of(folder: Path) -> tuple[Path, Path]:
    """Return the cluster and the model of a folder."""
    models = sorted([*folder.glob("*.flags"), *folder.glob("gpt*.sh")])
    return cluster_of(folder), models[0]


def cluster_of(folder: Path) -> Path:
    """Return the cluster of a folder: cluster.yaml, or before.yaml of one that loses a machine."""
    found = [folder / name for name in ("cluster.yaml", "before.yaml")]
    return next(path for path in found if path.exists())


def jobs(only: Sequence[str] | None = None) -> list[Job]:
    """Return examples, settings, then rehearsed clusters; those whose name contains one of `only`,
    if that is given."""
    folders = [*FOLDERS, ROOT / "examples/budget"]
    folders += [ROOT / f"benchmarks/settings/setting-{name}" for name in ("1-7b", "1-13b", "3-30b")]
    found = [Job(folder.name, *files_of(folder)) for folder in folders]
    three = ROOT / "examples/three-gpus"
    found.append(Job(three.name, three / "cluster.yaml", three / "config.json", _THREE_GPUS))
    big = ROOT / "examples/h100-a100-l40s"
    model = ROOT / "examples/a100-rtx4090/gpt-7b.sh"
    found.append(Job(f"{big.name}, 22B", big / "cluster.yaml", model, _64_GPUS))
    for name, (cluster, size) in CLUSTERS.items():
        path, flags = MODELS[size]
        found.append(Job(f"{name}, {size}", ROOT / cluster, ROOT / path, flags))
    return [job for job in found if is_chosen(job.name, only)]


def boxes(folder: Path) -> list[tuple[str, Path, str]]:
    """Return the name and the file of each single machine of a folder, and the flag of the best
    precision that all its cards have."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        nodes = load_cluster(path).nodes
        flag = "--bf16" if all(node.gpu_type.peak_flops["bf16"] for node in nodes) else "--fp16"
        found.append((path.stem, path, flag))
    return found


def plan_or_none(cluster: Cluster, workload: Workload, **options: Any) -> Plan | None:
    """Return the plan of `plan_cluster`; None where nothing fits."""
    try:
        return plan_cluster(cluster, workload, **options)
    except InfeasiblePlanError:
        return None


def step_s(plan: Plan) -> float:
    """Return the predicted seconds of a step of a plan that the planner made."""
    if plan.estimates is None:
        raise RuntimeError("the planner gives every plan estimates")
    return plan.estimates.step_time_s


def quoted(layout: object) -> str:
    """Write a layout as code in a cell of a Markdown table."""
    return f"`{layout}`".replace("|", "\\|")
