"""Result of a rehearsal: observed times beside predicted times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.schedule.parts import MessageSpan, OpSpan
from megatron_hetero.schedule.programme import Operation, OperationKind
from megatron_hetero.schedule.simulator.step import StepSimulation
from megatron_hetero.schedule.simulator.timelines import StageTimeline


@dataclass(frozen=True)
class LineLoad:
    """Seconds of a step for which traffic takes a line, or a path between two nodes.

    One number is from the simulation, the other from the messages that the processes sent.
    """

    name: str
    predicted_s: float
    rehearsed_s: float

    @property
    def error(self) -> float | None:
        """Return predicted over rehearsed, minus 1; None if nothing was sent."""
        return self.predicted_s / self.rehearsed_s - 1 if self.rehearsed_s else None


@dataclass(frozen=True)
class Rehearsal:
    """Prediction and observation of a step.

    `stages` are those of the median step, [replica][stage], in the cluster's seconds (divided by
    `time_scale`), without memory. `largest_lag_s` is in this machine's seconds.
    """

    predicted: StepSimulation
    stages: tuple[tuple[StageTimeline, ...], ...]
    messages: tuple[MessageSpan, ...]
    lines: tuple[LineLoad, ...]
    """Loads of the median step."""
    step_times_s: tuple[float, ...]
    time_scale: float
    largest_lag_s: float
    num_disturbed: int
    """Steps in which this machine did not keep pace; they do not count unless there are no
    others."""
    is_stock: bool
    layers: str = ""
    """Layers that the processes trained with, in words."""

    @property
    def step_time_s(self) -> float:
        """Return the median over the steps, in seconds of the cluster."""
        return median(self.step_times_s)

    @property
    def error(self) -> float:
        """Return predicted over rehearsed, minus 1."""
        return self.predicted.step_time_s / self.step_time_s - 1


def gather(
    plan: Plan,
    predicted: StepSimulation,
    records: Sequence[Sequence[Mapping[str, Any]]],
    stock: bool,
    between_nodes: Set[str],
) -> Rehearsal:
    """Combine the records of the ranks, [rank][step] as `StepPace.records`.

    Args:
        plan: the rehearsed plan.
        predicted: its simulation.
        records: the records of each rank.
        stock: stock Megatron ran the plan.
        between_nodes: names of the paths and lines whose loads are compared.
    """
    # Steps that this machine did not disturb; all of them if there are none.
    tried = range(len(records[0]))
    kept = [step for step in tried if not any(rank[step]["is_disturbed"] for rank in records)]
    steps = kept or list(tried)
    # The median step is the one shown.
    step_times_s = {
        step: max(rank[step]["end_s"] for rank in records) / records[0][step]["scale"]
        for step in steps
    }
    shown = sorted(steps, key=step_times_s.__getitem__)[len(steps) // 2]
    scale = float(records[0][shown]["scale"])
    table = rank_table(plan)
    stages: dict[tuple[int, int], StageTimeline] = {}
    messages = []
    # Messages of every rank; spans of one rank for each stage.
    for rank, place in enumerate(table):
        record = records[rank][shown]
        key = (place.replica, place.stage)
        for receiver, _, posted_s, arrival_s in record["sent"]:
            to = table[receiver].stage
            kind: OperationKind = "send_forward" if to > place.stage else "send_backward"
            times_s = [seconds / scale for seconds in (posted_s, posted_s, arrival_s, arrival_s)]
            messages.append(
                MessageSpan(place.replica, place.stage, to, Operation(kind, -1), *times_s)
            )
        if place.tensor_rank > 0 or place.context_rank > 0:
            continue
        spans = [
            OpSpan(kind, micro_batch, chunk, start_s / scale, end_s / scale)
            for kind, micro_batch, chunk, start_s, end_s in record["spans"]
        ]
        spans += [
            OpSpan(kind, -1, 0, start_s / scale, end_s / scale)
            for kind, start_s, end_s in record["collectives"]
        ]
        stage = plan.replicas[place.replica].stages[place.stage]
        stages[key] = StageTimeline(
            *key, stage.devices, tuple(sorted(spans, key=lambda s: s.start_s)), (), 0
        )
    flat = [rank[step] for rank in records for step in steps]
    return Rehearsal(
        predicted,
        tuple(
            tuple(stages[r, s] for s in range(len(replica.stages)))
            for r, replica in enumerate(plan.replicas)
        ),
        tuple(messages),
        tuple(_line_loads(predicted, [rank[shown]["line_s"] for rank in records], between_nodes)),
        tuple(step_times_s.values()),
        scale,
        max(step["largest_lag_s"] for step in flat),
        len(tried) - len(kept),
        stock,
    )


def _line_loads(
    predicted: StepSimulation, by_rank: Sequence[Mapping[str, float]], between_nodes: Set[str]
) -> list[LineLoad]:
    """Compare the loads of the lines that the simulation counts between nodes, busiest first.

    A path that has no line of lower bandwidth exists in the rehearsal only.
    """
    loads = [
        LineLoad(link.name, link.busy_s, sum(rank.get(link.name, 0.0) for rank in by_rank))
        for link in predicted.links
        if link.name in between_nodes
    ]
    return sorted(loads, key=lambda load: -load.rehearsed_s)


def rehearsal_to_data(rehearsal: Rehearsal, plan: Plan) -> dict[str, Any]:
    """Return `predicted_step_time_s, rehearsed_step_time_s, error`, also of stages, and more.

    The time of a stage is the end of its last backward pass.
    """
    predicted = rehearsal.predicted
    return {
        "predicted_step_time_s": predicted.step_time_s,
        "rehearsed_step_time_s": rehearsal.step_time_s,
        "error": rehearsal.error,
        "layout": format_layout(plan.layout),
        "stock_megatron": rehearsal.is_stock,
        "layers": rehearsal.layers,
        "num_ranks": plan.layout.num_devices,
        "time_scale": rehearsal.time_scale,
        "step_times_s": list(rehearsal.step_times_s),
        "num_disturbed_steps": rehearsal.num_disturbed,
        "largest_lag_s": rehearsal.largest_lag_s,
        "lines": [asdict(load) | {"error": load.error} for load in rehearsal.lines],
        "stages": [
            {
                "replica": before.replica,
                "stage": before.stage,
                "devices": list(before.devices),
                "predicted_s": before.compute_end_s,
                "rehearsed_s": after.compute_end_s,
                "error": before.compute_end_s / after.compute_end_s - 1,
                "predicted_busy_s": before.busy_s,
                "rehearsed_busy_s": after.busy_s,
                "operations": [operation._asdict() for operation in after.operations],
            }
            for replica, seen in zip(predicted.stages, rehearsal.stages, strict=True)
            for before, after in zip(replica, seen, strict=True)
        ],
    }
