"""The serving plan: replicas on named GPUs, who serves what, and what is expected of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.checks.devices import is_host_name
from megatron_hetero.serving.prices.basis import PriceBasis
from megatron_hetero.serving.prices.engine import EngineName

Goal = Literal["throughput", "cost", "goodput"]
Phase = Literal["both", "prefill", "decode"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_DEVICE = re.compile(r"\S+:[0-9]{1,4}\Z")


@dataclass(frozen=True)
class PlannedStage:
    """Consecutive layers on GPUs of a machine that divide every layer.

    `devices` are `machine:index`; `gpu` is their type.
    """

    devices: tuple[str, ...]
    host: str
    gpu: str
    num_layers: int


@dataclass(frozen=True)
class PlannedReplica:
    """A replica of an engine.

    Attributes:
        place: its pool.
        rates: requests per second of each class, in the order of the plan's classes.
        kv_tokens: whose keys and values fit in all layers, as predicted; requests that are longer
            than a window of attention need less.
        max_sequences: that run at once.
        utilization: part of its time that these rates take.
    """

    name: str
    phase: Phase
    place: str
    stages: tuple[PlannedStage, ...]
    rates: tuple[float, ...]
    kv_tokens: int
    max_sequences: int
    utilization: float

    @property
    def width(self) -> int | None:
        """Return the tensor-parallel width; None where stages have unlike ones."""
        widths = {len(stage.devices) for stage in self.stages}
        return widths.pop() if len(widths) == 1 else None

    @property
    def num_gpus(self) -> int:
        """Return its GPUs."""
        return sum(len(stage.devices) for stage in self.stages)

    @property
    def shape(self) -> str:
        """Return the stages in a line: `H100-80GB tp4:40, A100-80GB tp4:40`."""
        return ", ".join(f"{s.gpu} tp{len(s.devices)}:{s.num_layers}" for s in self.stages)


@dataclass(frozen=True)
class PlannedClass:
    """A class of requests; None where it has no deadline."""

    name: str
    rate_per_s: float
    mean_input: float
    mean_output: float
    first_token_s: float | None
    between_tokens_s: float | None


@dataclass(frozen=True)
class HandOver:
    """Requests per second of each class whose keys and values go from the prefill replicas of a
    place to the decode replicas of a place."""

    sender: str
    receiver: str
    rates: tuple[float, ...]


@dataclass(frozen=True)
class ClassForecast:
    """Simulated seconds of a class: the median and the 99th of a hundred; kept deadlines."""

    name: str
    num_requests: int
    first_token_p50_s: float
    first_token_p99_s: float
    between_tokens_p50_s: float
    between_tokens_p99_s: float
    attainment: float


@dataclass(frozen=True)
class FleetForecast:
    """A simulated run at `load` times the workload's rates, of `seconds` of arrivals.

    `kept_up` are the first tokens for each request that came in the second half; None where the
    run does not tell.
    """

    load: float
    seconds: float
    seed: int
    tokens_per_s: float
    attainment: float
    num_preemptions: int
    classes: tuple[ClassForecast, ...]
    kept_up: float | None = None


@dataclass(frozen=True)
class ServedAs:
    """Model and formats, in the form given to engines.

    `is_quantized`: the checkpoint names its format itself, and engines refuse a flag that differs.
    """

    source: str
    num_layers: int
    weights: str
    keys_values: str
    weight_bytes: float
    is_quantized: bool = False

    @property
    def is_made_fp8(self) -> bool:
        """Return whether engines are to make fp8 weights of a checkpoint in 16 bits."""
        return self.weights == "fp8" and not self.is_quantized


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine that the plan counts on."""

    name: EngineName
    memory_part: float
    block_tokens: int
    max_batched_tokens: int


@dataclass(frozen=True)
class ServingPlan:
    """A fleet.

    Attributes:
        scale: served rates over the workload's, as rates say; the bound is of the same programme.
        bound: no fleet of these shapes at these prices serves more (costs less).
        cost_per_hour: None without prices.
        any_engine: what the goal's figure would be if an engine ran pipelines of unlike widths;
            None where it was not asked.
        prices: what the prices of its GPU types rest on.
        hand_overs: between which places, as links between these allow.
    """

    goal: Goal
    engine: EngineSettings
    model: ServedAs
    classes: tuple[PlannedClass, ...]
    replicas: tuple[PlannedReplica, ...]
    scale: float
    bound: float
    gap: float
    utilization: float
    cost_per_hour: float | None
    budget_per_hour: float | None
    forecast: FleetForecast | None
    any_engine: float | None
    made_by: str
    prices: tuple[PriceBasis, ...] = ()
    hand_overs: tuple[HandOver, ...] = ()

    @property
    def has_prefill_apart(self) -> bool:
        """Return whether some replicas only prefill."""
        return any(replica.phase == "prefill" for replica in self.replicas)

    @property
    def hand_over_groups(self) -> list[set[tuple[str, str]]]:
        """Return the parts of the fleet that hand over inside alone, as sets of (phase, place)."""
        groups: list[set[tuple[str, str]]] = []
        for pair in self.hand_overs:
            joined = {("prefill", pair.sender), ("decode", pair.receiver)}
            for group in [g for g in groups if g & joined]:
                groups.remove(group)
                joined |= group
            groups.append(joined)
        # Plans of older versions do not say who hands over to whom.
        return groups or [{(r.phase, r.place) for r in self.replicas if r.phase != "both"}]


def check_plan(plan: ServingPlan, source: str = "plan") -> None:
    """Check every invariant of a serving plan.

    Raises:
        PlanFormatError: names the replica and the rule.
    """
    faults = _unsound_names(plan)
    # Every GPU is in one stage of one replica.
    used = Counter(d for r in plan.replicas for s in r.stages for d in s.devices)
    for device, count in used.items():
        if count > 1:
            faults.append(f"{device} is in {count} places; a GPU is in one")
    names = Counter(replica.name for replica in plan.replicas)
    faults += [f'two replicas are called "{name}"' for name, n in names.items() if n > 1]
    # Each replica holds the whole model and has a rate for every class.
    for replica in plan.replicas:
        layers = sum(stage.num_layers for stage in replica.stages)
        if layers != plan.model.num_layers:
            faults.append(
                f"{replica.name}: its stages hold {layers} layers; the model has "
                f"{plan.model.num_layers}"
            )
        if any(not s.devices or s.num_layers < 1 for s in replica.stages):
            faults.append(f"{replica.name}: a stage without GPUs or without layers")
        if len(replica.rates) != len(plan.classes) or any(rate < 0 for rate in replica.rates):
            faults.append(
                f"{replica.name}: {len(replica.rates)} rates; there are {len(plan.classes)} "
                "classes, each with a rate of 0 or more"
            )
    # A prompt that is prefilled apart has to be decoded somewhere.
    phases = {replica.phase for replica in plan.replicas}
    if ("prefill" in phases) != ("decode" in phases):
        faults.append("replicas that prefill need others that decode, and the other way round")
    # Hand-overs are between places of such replicas.
    for pair in plan.hand_overs:
        for phase, place in (("prefill", pair.sender), ("decode", pair.receiver)):
            if all((r.phase, r.place) != (phase, place) for r in plan.replicas):
                faults.append(f"hand_overs: no {phase} replica is at {place}")
        if len(pair.rates) != len(plan.classes) or any(rate < 0 for rate in pair.rates):
            faults.append(f"hand_overs: {pair.sender} to {pair.receiver}: a rate for each class")
    if not plan.replicas:
        faults.append("there are no replicas")
    if faults:
        raise PlanFormatError("\n".join(f"{source}: {fault}" for fault in faults))


def _unsound_names(plan: ServingPlan) -> list[str]:
    """List names that files, commands and addresses of a launch could not be made of."""
    names = [("replica", replica.name) for replica in plan.replicas]
    names += [("class", kind.name) for kind in plan.classes]
    faults = [
        f"{what} {name!r}: allowed are 1 to 63 letters, digits and . _ -, the first a letter or "
        "digit"
        for what, name in names if not _NAME.match(name)
    ]  # fmt: skip
    for replica in plan.replicas:
        for stage in replica.stages:
            if not is_host_name(stage.host):
                faults.append(
                    f"{replica.name}: host {stage.host!r} is no host name; allowed are RFC 1123 "
                    "names and IP addresses"
                )
            faults += [
                f"{replica.name}: device {device!r} is not machine:index, such as h100-0:3"
                for device in stage.devices if not _DEVICE.match(device)
            ]  # fmt: skip
    return faults
