"""Differences between two plans, in words: replicas, stages, layers, devices, estimates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_hetero.plan.checks.violation import layer_range, stage_name
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, Plan, Replica, Stage
from megatron_hetero.plan.ranks import device_places, place_name
from megatron_hetero.units import format_bytes, format_duration

MEMORY = "memory in use"
"""Name of a difference in the memory held by a GPU, without the reserve."""
_OF_THE_JOB = "the job's"


@dataclass(frozen=True)
class Difference:
    """One difference: where, what, and both values as text; None where a plan has nothing there."""

    where: str
    what: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.where}: {self.what} added: {self.after}"
        if self.after is None:
            return f"{self.where}: {self.what} removed: {self.before}"
        return f"{self.where}: {self.what} {self.before} -> {self.after}"


def diff_plans(before: Plan, after: Plan) -> tuple[Difference, ...]:
    """Find every difference that matters to a run or to the prediction, the most important first;
    empty for equal plans."""
    return tuple(
        difference
        # What people ask first comes first: speed, then shape, job, places, memory, inputs.
        for source in (_estimates, _replicas, _job, _devices, _memory, _inputs)
        for difference in source(before, after)
    )


def _changed(where: str, what: str, before: Any, after: Any) -> Iterator[Difference]:
    if before != after:
        yield Difference(where, what, _text(before), _text(after))


def _text(value: Any) -> str | None:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return None if value is None else str(value)


def _replicas(before: Plan, after: Plan) -> Iterator[Difference]:
    # Replicas and stages by number, also those that only one of the plans has.
    for r in range(max(len(before.replicas), len(after.replicas))):
        old, new = _at(before.replicas, r), _at(after.replicas, r)
        if old is None or new is None:
            yield Difference(f"replica {r}", "replica", _replica_text(old), _replica_text(new))
            continue
        yield from _changed(
            f"replica {r}", "micro-batches", old.num_micro_batches, new.num_micro_batches
        )
        yield from _changed_setting(
            f"replica {r}", "micro-batch size", old.micro_batch_size, new.micro_batch_size
        )
        for s in range(max(len(old.stages), len(new.stages))):
            yield from _stage(stage_name(r, s), _at(old.stages, s), _at(new.stages, s))


def _stage(where: str, old: Stage | None, new: Stage | None) -> Iterator[Difference]:
    if old is None or new is None:
        yield Difference(where, "stage", _stage_text(old), _stage_text(new))
        return
    yield from _changed(
        where, "tensor-parallel width", old.shape.tensor_parallel, new.shape.tensor_parallel
    )
    contexts = old.shape.context_parallel, new.shape.context_parallel
    yield from _changed(where, "context-parallel size", *contexts)
    for what, field in (("shares", "shares"), ("shares of sequences", "context_shares")):
        yield from _changed(where, what, _shares(old, field), _shares(new, field))
    yield from _changed(where, "experts", _experts(old), _experts(new))
    yield from _changed(where, "holds", _layers(old), _layers(new))
    sharded = old.shape.num_sharded_layers, new.shape.num_sharded_layers
    yield from _changed(where, "sharded layers", *sharded)
    for field, default in _DEFAULTS.items():
        yield from _changed_setting(
            where, field.replace("_", " "), getattr(old, field), getattr(new, field), default
        )


_DEFAULTS = {
    "recompute": _OF_THE_JOB,
    "recompute_num_layers": _OF_THE_JOB,
    "precision": _OF_THE_JOB,
    "num_launched_forwards": "1F1B's own",
    "order": "1F1B",
    "optimizer_share": "1",
}
"""Meaning of a stage's setting that is None."""


def _changed_setting(
    where: str, what: str, before: Any, after: Any, default: str = _OF_THE_JOB
) -> Iterator[Difference]:
    """Compare a setting for which None has a meaning: it is a value, not an absence."""
    if before != after:
        yield Difference(where, what, _text(before) or default, _text(after) or default)


def _devices(before: Plan, after: Plan) -> Iterator[Difference]:
    """Report moves by device: easier to follow than two lists for each stage."""
    old, new = _place_of_device(before), _place_of_device(after)
    for device in sorted(old.keys() | new.keys()):
        if old.get(device) != new.get(device):
            yield Difference(
                f"device {device}",
                "moves",
                old.get(device, "not in the plan"),
                new.get(device, "not in the plan"),
            )


def _place_of_device(plan: Plan) -> dict[str, str]:
    places = dict.fromkeys(plan.idle_devices, "idle")
    layout = plan.layout
    for device, place in device_places(plan).items():
        places[device] = place_name(place, layout)
    return places


def _job(before: Plan, after: Plan) -> Iterator[Difference]:
    # Schedule, hosts, exchange.
    yield from _changed("plan", "schedule", before.schedule, after.schedule)
    yield from _changed(
        "launch",
        "hosts in rank order",
        *([f"{h.node}{list(h.gpu_indices)}" for h in plan.hosts] for plan in (before, after)),
    )
    yield from _changed(
        "plan",
        "exchange groups",
        *([" + ".join(group) for group in plan.exchange_groups] for plan in (before, after)),
    )
    yield from _changed(
        "plan",
        "exchange uplinks",
        *([list(group) for group in plan.exchange_uplinks] for plan in (before, after)),
    )
    # Sizes of the model and the training, field by field.
    if before.workload is None or after.workload is None:
        if before.workload is not after.workload:
            yield Difference("plan", "workload", *map(_workload_text, (before, after)))
        return
    for part in ("model", "training"):
        old, new = getattr(before.workload, part), getattr(after.workload, part)
        for field in dataclasses.fields(old):
            yield from _changed(
                part, field.name, getattr(old, field.name), getattr(new, field.name)
            )
    # Flags of Megatron by name, as the user gave them: a size then has two lines, here and above.
    old_flags = _values_of_flags(before.workload.megatron_args)
    new_flags = _values_of_flags(after.workload.megatron_args)
    for name in sorted(old_flags.keys() | new_flags.keys()):
        yield from _changed("Megatron flag", name, old_flags.get(name), new_flags.get(name))


def _values_of_flags(args: tuple[str, ...]) -> dict[str, str]:
    """Map flags to their values; a switch is "given"."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in args:
        # A later flag takes the place of an earlier one; `--flag=value` counts like two words.
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values[name] = [value] if value else []
        else:
            values.setdefault(name, []).append(word)
    return {name: " ".join(found) or "given" for name, found in values.items()}


def _workload_text(plan: Plan) -> str | None:
    return None if plan.workload is None else plan.workload.source


def _estimates(before: Plan, after: Plan) -> Iterator[Difference]:
    old, new = before.estimates, after.estimates
    if old is None or new is None:
        if old is not new:
            yield Difference("estimates", "step time", _step_text(old), _step_text(new))
        return
    for what, field, show in (
        ("step time", "step_time_s", format_duration),
        ("throughput", "tokens_per_s", _token_rate),
        ("lower bound", "bound_s", format_duration),
        ("gradient sync", "gradient_sync_s", format_duration),
    ):
        yield from _number("estimates", what, getattr(old, field), getattr(new, field), show)
    fullest = _fullest(old), _fullest(new)
    yield from _number(
        "estimates", "fullest GPU", *fullest, lambda part: f"{part:.0%} of its memory"
    )
    yield from _changed("estimates", "measured", old.measured, new.measured)


def _fullest(estimates: Estimates) -> float | None:
    parts = (device.used_part for device in estimates.devices.values())
    return max(parts, default=None)


def _memory(before: Plan, after: Plan) -> Iterator[Difference]:
    old, new = before.estimates, after.estimates
    if old is None or new is None:
        return
    # Devices that only one plan uses are among those that move.
    for device in sorted(old.devices.keys() & new.devices.keys()):
        yield from _number(
            f"device {device}",
            MEMORY,
            old.devices[device].used_bytes,
            new.devices[device].used_bytes,
            format_bytes,
        )


def _number(
    where: str, what: str, old: float | None, new: float | None, show: Callable[[float], str]
) -> Iterator[Difference]:
    """Report the old and new value, with their ratio if both are known and the old is not 0."""
    if old == new:
        return
    before = None if old is None else show(old)
    after = None if new is None else show(new)
    if old and new is not None:
        after = f"{after} ({new / old:.3f}x)"
    yield Difference(where, what, before, after)


def _inputs(before: Plan, after: Plan) -> Iterator[Difference]:
    for name in sorted(before.inputs.keys() | after.inputs.keys()):
        old, new = before.inputs.get(name), after.inputs.get(name)
        # A few digits of a hash are enough to tell two apart.
        yield from _changed("inputs", f"hash of the {name}", old and old[:12], new and new[:12])
    yield from _changed("plan", "made by", before.made_by, after.made_by)


def _at[Item](items: tuple[Item, ...], index: int) -> Item | None:
    return items[index] if index < len(items) else None


def _replica_text(replica: Replica | None) -> str | None:
    return None if replica is None else format_layout(Layout((replica.shape,)))


def _stage_text(stage: Stage | None) -> str | None:
    if stage is None:
        return None
    context = stage.shape.context_parallel
    groups = f"cp{context}" if context > 1 else ""
    if of_sequences := stage.shape.context_shares:
        groups += f"({':'.join(map(str, of_sequences))})"
    is_dealt = stage.shape.expert_shares or stage.shape.expert_groups
    experts = _experts(stage) if is_dealt else ""
    return f"tp{stage.shape.tensor_parallel}{groups}{experts}, {_layers(stage)}"


def _experts(stage: Stage) -> str:
    table, groups = stage.shape.expert_shares, stage.shape.expert_groups
    if table is not None:
        return f"ep({':'.join(map(str, table))})"
    return "divided" if groups is None else f"ep{groups[0]}etp{groups[1]}"


def _shares(stage: Stage, field: str) -> str:
    shares = getattr(stage.shape, field)
    return "equal" if shares is None else ":".join(map(str, shares))


def _layers(stage: Stage) -> str:
    ranges = [
        layer_range(c.first_layer, c.first_layer + c.num_layers - 1) for c in stage_chunks(stage)
    ]
    return " and ".join(ranges)


def _step_text(estimates: Estimates | None) -> str | None:
    return None if estimates is None else format_duration(estimates.step_time_s)


def _token_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"
