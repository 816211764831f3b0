"""Measured time of each stage beside the prediction, during training, and the lagging GPUs.

Every rank sums the seconds of its forward and backward passes on its device (by CUDA events, so
that nothing waits for a kernel); at each interval of Megatron's log the ranks exchange one number
each. The compared quantity is a micro-batch's forward and backward pass, tensor-parallel
communication included, as in `Estimates.stage_times_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.megatron.guarded import standing_for
from megatron_hetero.runtime.observe.log_values import write_values

_COMPUTE = ("forward", "backward", "backward_input", "backward_weight")
STRAGGLER = 1.15
"""Ratio to the median of a GPU's type from which the GPU is named."""


class StageWatch:
    """Stopwatch for the passes of this rank; `watched` is entered around each operation."""

    def __init__(self) -> None:
        self._on_gpu = backend.cuda_is_usable()
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0
        self._num_forwards = 0

    @contextmanager
    def watched(self, kind: str) -> Iterator[None]:
        """Measure the time of the block if the operation computes."""
        if kind not in _COMPUTE:
            yield
            return
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            before = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - before
        # Each micro-batch has one forward on each chunk, so their number divides the seconds.
        self._num_forwards += kind == "forward"

    def take(self) -> float:
        """Return the seconds of a micro-batch, the mean since the last call; NaN if there was none.

        It waits for the device, so call it once an interval of the log.
        """
        seconds, num_forwards = self.take_all()
        return seconds / num_forwards if num_forwards else float("nan")

    def take_all(self) -> tuple[float, int]:
        """Return the seconds of all passes since the last call, and the number of forwards; it
        waits for the device."""
        if self._events:
            # Events of one stream end in order: the last one stands for all.
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        found = self._seconds, self._num_forwards
        self._events, self._seconds, self._num_forwards = [], 0.0, 0
        return found


def watch_stock_passes(watch: StageWatch) -> None:
    """Measure the passes of stock Megatron's schedules, in this process from now on."""
    from megatron.core.pipeline_parallel import schedules

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with watch.watched(kind):
                return function(*args, **kwargs)

        return standing_for(function, step)

    schedules.forward_step = timed("forward", schedules.forward_step)
    schedules.backward_step = timed("backward", schedules.backward_step)


class StageRatio:
    """Observer of Megatron's log (`runtime.megatron.training_log`) that adds lines."""

    def __init__(self, plan: Plan, watch: StageWatch) -> None:
        self._plan, self._watch = plan, watch

    @staticmethod
    def applies(plan: Plan) -> bool:
        """Tell if the plan has figures to compare with: of GPUs, or measured on this machine."""
        return plan.estimates is not None and bool(plan.hosts) and (
            backend.cuda_is_usable() or plan.estimates.measured
        )  # fmt: skip

    def observe(self, iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
        """Exchange the ranks' times and print the ratios. Collective at each interval of the log.

        Args:
            iteration: the step.
            loss_dict: Megatron's losses; not read.
            grad_norm: Megatron's norm; not read.
        """
        from megatron.training import get_args

        # Between two lines of Megatron's log nothing is exchanged.
        if iteration % get_args().log_interval:
            return
        mine = torch.tensor([self._watch.take()], dtype=torch.float64, device="cuda")
        found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        # The last rank prints, as in Megatron's log.
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        ratios = stage_ratios(self._plan, [float(x.item()) for x in found])
        for line in ratio_lines(self._plan, ratios):
            print(f" [stages] iteration {iteration:8d} | {line} |", flush=True)
        gain = {"possible-gain-of-new-layers": possible_gain(self._plan, ratios)}
        write_values(scalars(ratios) | gain, iteration)


@dataclass(frozen=True)
class RankRatio:
    """Measured over predicted seconds of a micro-batch on one rank."""

    rank: int
    replica: int
    stage: int
    device: str
    gpu_type: str
    seconds: float
    ratio: float


def stage_ratios(plan: Plan, seconds: Sequence[float]) -> tuple[RankRatio, ...]:
    """Compute the ratio of every rank.

    Args:
        plan: a plan with estimates and devices.
        seconds: [rank] -> seconds of a micro-batch on one model chunk.
    """
    if plan.estimates is None:
        raise ValueError("a plan without estimates predicts nothing")
    table = rank_table(plan)
    # A micro-batch passes all chunks of a stage, for which the prediction is made.
    stages = [plan.replicas[place.replica].stages[place.stage] for place in table]
    whole_s = [s * len(stage_chunks(stage)) for s, stage in zip(seconds, stages, strict=True)]
    return tuple(
        RankRatio(
            rank,
            place.replica,
            place.stage,
            place.device or "",
            plan.type_by_device[place.device or ""],
            whole_s[rank],
            whole_s[rank] / plan.estimates.stage_times_s[place.replica][place.stage],
        )
        for rank, place in enumerate(table)
    )


def ratio_lines(plan: Plan, ratios: Sequence[RankRatio]) -> Iterator[str]:
    """Yield lines for the log: stages, GPU types, stragglers, and the gain of a new division."""
    stages = ", ".join(
        f"r{r} s{s} {ratio:.2f}" for (r, s), ratio in _slowest_of_stages(ratios).items()
    )
    yield f"measured / predicted time of a micro-batch: {stages}"
    by_type = _by_type(ratios)
    yield "by GPU type: " + ", ".join(f"{name} {median(v):.2f}" for name, v in by_type.items())
    # Compare within a type: a whole type may be off the prediction alike.
    late = [r for r in ratios if r.ratio > STRAGGLER * median(by_type[r.gpu_type])]
    for straggler in sorted(late, key=lambda r: -r.ratio):
        beside = straggler.ratio / median(by_type[straggler.gpu_type]) - 1
        yield (
            f"straggler: {straggler.device} ({straggler.gpu_type}, rank {straggler.rank}) takes "
            f"{beside:.0%} longer than its type"
        )
    saved = possible_gain(plan, ratios)
    if saved >= 0.02:
        yield (
            f"layers divided by these times would shorten the slowest pipeline by up to {saved:.0%}"
            " (--hetero-timeline, then `report --measured` says what a new plan gains)"
        )


def possible_gain(plan: Plan, ratios: Sequence[RankRatio]) -> float:
    """Bound the gain of a perfect division of the slowest replica's layers, in the steady state.

    A stage of n layers at t seconds does n/t layers a second; all of a replica's stages together
    could do them at the sum of these rates. Whole layers, memory and hops are left out, so the
    result bounds the gain of planning anew for unequal stages. It is a part of the replica's time.
    """
    slowest = _seconds_of_stages(ratios)
    gains = []
    for r, replica in enumerate(plan.replicas):
        seconds = [slowest[r, s] for s in range(len(replica.stages))]
        layers = [stage.shape.num_layers for stage in replica.stages]
        # Layers a second of all stages together.
        rate = sum(n / t for n, t in zip(layers, seconds, strict=True))
        load = replica.num_micro_batches * max(seconds)
        # In a perfect division each stage would take sum(layers) / rate seconds.
        gains.append((load, 1 - sum(layers) / rate / max(seconds)))
    # The replica with the largest load ends the step.
    return max(gains)[1]


def scalars(ratios: Sequence[RankRatio]) -> dict[str, float]:
    """Return the ratios by name, for TensorBoard."""
    found = {
        f"stage-ratio/replica-{r}-stage-{s}": ratio
        for (r, s), ratio in _slowest_of_stages(ratios).items()
    }
    by_type = _by_type(ratios)
    return found | {f"gpu-type-ratio/{name}": median(v) for name, v in by_type.items()}


def _slowest_of_stages(ratios: Sequence[RankRatio]) -> Mapping[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for r in ratios:
        found[r.replica, r.stage] = max(found.get((r.replica, r.stage), 0.0), r.ratio)
    return found


def _seconds_of_stages(ratios: Sequence[RankRatio]) -> Mapping[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for r in ratios:
        found[r.replica, r.stage] = max(found.get((r.replica, r.stage), 0.0), r.seconds)
    return found


def _by_type(ratios: Sequence[RankRatio]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for r in ratios:
        found.setdefault(r.gpu_type, []).append(r.ratio)
    return found
