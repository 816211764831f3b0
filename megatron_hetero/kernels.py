"""The planner's compiled loops, where the installation has them.

`pip install` compiles `_kernels.c` where it finds a C compiler.  Without one the planner runs the
same loops in Python, several times more slowly, with results equal to the bit.
"""

from __future__ import annotations

from collections.abc import Buffer, Sequence
from importlib import import_module
from typing import Protocol, cast

CompiledCrossing = tuple[Sequence[int], Sequence[float], float]
"""Numbers of the paths of a message, the seconds on each path, and the latency in seconds."""
CompiledPipeline = tuple[
    Sequence[int],
    int,
    bool,
    Sequence[float],
    Sequence[float],
    Sequence[CompiledCrossing],
    Sequence[CompiledCrossing],
]
"""The fields of `schedule.simulator.crowd.OneFOneB`, in their order."""


class Kernels(Protocol):
    """The functions of `_kernels.c`."""

    def stage_ends(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        forward_busy_s: Sequence[float],
        forward_latency_s: Sequence[float],
        backward_busy_s: Sequence[float],
        backward_latency_s: Sequence[float],
        num_micro_batches: int,
        launch_counts: Sequence[int],
        /,
    ) -> tuple[float, ...]:
        """Return when each stage's last backward pass ends (`cost.pipeline.stage_ends_s`)."""

    def shared_ends(
        self, pipelines: Sequence[CompiledPipeline], num_paths: int, /
    ) -> tuple[tuple[float, ...], ...] | None:
        """Return when each stage's last pass ends (`schedule.simulator.crowd.crowd_ends_s`)."""

    def relaxed_ends(
        self,
        steps: Buffer,
        num_messages: int,
        rows_s: Buffer,
        busy_s: Sequence[float],
        latency_s: Sequence[float],
        num_stages: int,
        ends_s: Buffer,
        /,
    ) -> None:
        """Write when each stage's last computation or message ends, for many divisions of the
        layers (`schedule.simulator.relaxed.RelaxedRun.spans_s`)."""

    def least_of_rests(
        self, least: Buffer, rests_s: Buffer, rows: Buffer, add_s: Buffer, floor_s: Buffer, /
    ) -> None:
        """Lower `least` to the best way to go on (`bounds.chains.rests.least_of_rests`)."""

    def block_paths(
        self,
        layers: Buffer,
        base_s: Buffer,
        first_layers: Buffer,
        first_base_s: Buffer,
        num_widths: Buffer,
        layer_s: Buffer,
        hops_s: Buffer,
        may_start: Buffer,
        may_end: Buffer,
        prices: Buffer,
        periods_s: Buffer,
        less: float,
        end_cost: Buffer,
        end: Buffer,
        by: Buffer,
        /,
    ) -> None:
        """Write `end_cost`, `end` and `by`: the cheapest pipeline of each period
        (`planner.columns.bundle_paths.BundlePaths`)."""

    def divide_layers(
        self,
        num_layers: int,
        times_s: Sequence[Sequence[float]],
        trips_s: Sequence[float],
        num_micro_batches: float,
        num_halvings: int,
        /,
    ) -> tuple[int, ...] | None:
        """Return layers by stage (`planner.division.layers.minimax`, and with halvings
        `planner.completion.filled.balanced`)."""

    def busiest_path(self, rings: Sequence[tuple[Buffer, float]], num_paths: int, /) -> float:
        """Return the seconds of the busiest path (`planner.evaluate.tail`)."""

    def latest_end(
        self,
        steps: Sequence[tuple[Buffer, Buffer, float, float, float, float, int, float, float]],
        order: Sequence[int],
        carried: Sequence[int],
        carried_s: Sequence[float],
        holders: Sequence[tuple[Sequence[int], Sequence[float]]],
        rounding: float,
        /,
    ) -> float:
        """Return when the last exchange is done, from when each is due
        (`cost.sync.exchange_clock.last_end_s`); `holders` is empty where all buckets find room."""


def _load() -> Kernels | None:
    # An installation without a C compiler has no such module.
    try:
        module = import_module("megatron_hetero._kernels")
    except ImportError:
        return None
    # A checkout may have one from before its newest loops.
    loops = (name for name in vars(Kernels) if not name.startswith("_"))
    return cast(Kernels, module) if all(hasattr(module, loop) for loop in loops) else None


KERNELS = _load()
"""The compiled functions, or None where there are none."""
