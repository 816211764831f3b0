"""Predicted against measured: the memory that one rank holds, and the seconds of its step.

The prediction is the planner's own, from a profile that `lab.probe` measures here first; the rank
trains on the own runtime.  On a GPU the memory is torch's peak of allocated bytes against the
plan's peak of tensors and torch's workspaces; on a CPU, whose allocator counts nothing, the bytes
of live tensors against the parts of the prediction.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import CHOICES, Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.libraries import torch_workspace_bytes
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.lab.kit.live_bytes import LiveBytes
from megatron_hetero.lab.kit.small_job import TRAINING, Machine, on_this_backend
from megatron_hetero.lab.probe.command import ProbeRequest, probe
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.estimates import DeviceEstimate
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.arguments import HeteroArguments
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.megatron import training_log
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.runtime.transformer_engine.attention import attention_kernel
from megatron_hetero.schedule.estimate import estimate_plan

_LAYOUT = "tp1:4 @4"
_WARM_UP, _STEPS = 3, 6
_LIMIT_S = 120.0
"""Seconds of the measurement of the profile, and of each training."""
_CPU = GpuType(
    "CPU", 1 << 40, 1e10, dict.fromkeys(("bf16", "fp16", "fp32"), 1e11), "8.0", "not a GPU"
)
"""Times come from the profile; no figure of it is used."""


@dataclass(frozen=True)
class Forecast:
    """Bytes and seconds, predicted and measured; `parts` are (predicted, measured) by name, and
    `attention` is Transformer Engine's kernel on a GPU."""

    predicted_bytes: int
    held_bytes: int
    predicted_step_s: float
    step_s: float
    attention: str | None
    parts: dict[str, tuple[int, int]]


def forecast(
    machine: Machine,
    profile: Path,
    folder: Path,
    on_progress: Callable[[str], None],
    named: str = layers.LOCAL,
) -> Forecast:
    """Measure a profile, plan with it, train and compare.

    Args:
        machine: the GPUs of the machine, or none.
        profile: the file that is written.
        folder: for the files of the training.
        on_progress: called with the present activity, in words.
        named: Megatron's local layers in fp32, or Transformer Engine's in bf16.
    Raises:
        CheckFailedError, RankFailedError: a process of the probe, or of the training, failed.
    """
    flags = machine.model(named)
    workload = load_workload(None, flags)
    seconds = 0.5 if machine.num_gpus == 0 else 2.0
    # One width and one micro-batch size: those of the plan below.
    asked = ProbeRequest(workload, machine.gpu, (1,), (1,), 4, seconds, profile, 1)
    probe(replace(asked, limit_s=_LIMIT_S), on_progress)
    on_progress("training with what was measured")
    measured = _train(machine, workload, folder)
    plan, estimate = _predicted(machine, workload, profile, measured["attention"])
    parts = {
        name: (estimate.parts_bytes[name], measured["parts"][name]) for name in measured["parts"]
    }
    # Torch's peak on a GPU includes the workspaces of its libraries; live bytes do not.
    predicted = estimate.tensor_bytes
    if machine.num_gpus:
        predicted += torch_workspace_bytes(gpu_type(machine.gpu))
    held = measured["peak_bytes"]
    # A CPU's allocator counts nothing, so that the sum of the parts stands for the peak.
    if held is None:
        predicted, held = (sum(side) for side in zip(*parts.values(), strict=True))
    assert plan.estimates is not None
    step_s = plan.estimates.step_time_s
    return Forecast(predicted, held, step_s, measured["step_s"], measured["attention"], parts)


def _predicted(
    machine: Machine, workload: Workload, profile: Path, attention: str | None
) -> tuple[Plan, DeviceEstimate]:
    """Return the plan on a single device with the device's estimate.

    Args:
        machine: the GPUs of the machine, or none.
        workload: what trains.
        profile: the file of measurements.
        attention: Transformer Engine's kernel here; None: not said.
    """
    gpu = gpu_type(machine.gpu) if machine.num_gpus else _CPU
    # A single device sends nothing, so that any link serves; a reserve would hide an error.
    link = Link(1e9, 1e-5)
    limits = Limits(memory_reserve_bytes=0, as_given=CHOICES)
    cluster = Cluster((Node("here", gpu, 1, "here", "localhost", link),), {}, limits)
    # Local layers store scores, and a CPU has no fused activation, whatever the flags say.
    training = workload.training
    if layers.names(workload.megatron_args) == layers.LOCAL or not machine.num_gpus:
        training = replace(training, fused_activation=False)
    if layers.names(workload.megatron_args) == layers.LOCAL or attention == "unfused":
        training = replace(training, flash_attention=False)
    priced = replace(workload, training=training)
    plan = place_in_order(plan_from_layout(parse_layout(_LAYOUT), priced), cluster)
    estimates = estimate_plan(plan, cluster, load_profile(profile), bounded=False)
    plan = replace(plan, estimates=estimates)
    assert plan.estimates is not None
    return plan, plan.estimates.devices["here:0"]


def _train(machine: Machine, workload: Workload, folder: Path) -> dict[str, Any]:
    """Train on one rank of the own runtime; return the median step, the memory and, on a GPU, the
    kernel of attention.

    The memory is torch's peak on a GPU, else the live bytes by part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_from_layout(parse_layout(_LAYOUT))
    save_plan(plan, folder / "plan.json")
    argv = (*workload.megatron_args, *TRAINING, f"--data-cache-path={folder / 'cache'}")

    # One run for the time, one for the bytes by part.
    def paced(rank: int) -> None:
        ends: list[float] = []
        # Megatron's log calls at the end of every iteration.
        training_log.add_observer(lambda *given: ends.append(time.perf_counter()))
        _run(plan, folder, (*argv, f"--train-iters={_WARM_UP + _STEPS}"), None)
        # The first difference begins at the end of the last step of the warm-up.
        steps = [b - a for a, b in pairwise(ends[_WARM_UP - 1 :])]
        peak = torch.cuda.max_memory_allocated() if machine.num_gpus else None
        # Local layers store scores, whatever Transformer Engine has.
        is_asked = machine.num_gpus and layers.names(argv) != layers.LOCAL
        attention = attention_kernel(workload.model) if is_asked else None
        found = {
            "step_s": statistics.median(steps),
            "peak_bytes": peak,
            "attention": attention,
        }
        (folder / "step.json").write_text(json.dumps(found))

    def counted(rank: int) -> None:
        live = LiveBytes()
        _run(plan, folder, (*argv, "--train-iters=2"), live)
        live.save(folder / "parts.json")

    # What counts tensors slows the step; a GPU's allocator counts them itself.
    for name, train in (("step", paced), ("bytes", counted))[: 1 if machine.num_gpus else 2]:
        run_jobs([LocalJob(name, 1, on_this_backend(train), folder / name)], _LIMIT_S)
    parts = folder / "parts.json"
    return {
        **json.loads((folder / "step.json").read_text()),
        "parts": {} if machine.num_gpus else json.loads(parts.read_text()),
    }


def _run(plan: Plan, folder: Path, argv: tuple[str, ...], observer: LiveBytes | None) -> None:
    if not backend.cuda_is_usable():
        backend.activate_cpu_backend()
        argv = (*argv, *layers.cpu_flags(argv))
    arguments = HeteroArguments(None, folder / "plan.json", "layout-independent", argv)
    # The runtime gets the layout alone; devices of a described cluster mean nothing here.
    bare = plan_from_layout(plan.layout)
    entry.train_asymmetric(bare, arguments, World.from_environment(), observer)
