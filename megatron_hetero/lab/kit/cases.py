"""Plans that the kit trains: every asymmetric path of the runtime, in few ranks and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_hetero.lab.kit.orders import with_interleaving, with_zero_bubble
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Host, Plan
from megatron_hetero.runtime.transformer_engine.layers import LOCAL, TRANSFORMER_ENGINE


@dataclass(frozen=True)
class Case:
    """A plan and how it trains.

    Attributes:
        name: the path of the runtime, in words.
        layout: the plan, but for what `change` adds.
        flags: Megatron's.
        precision: that of all stages.
        optimizer: "adam" or "sgd".
        change: the part of the plan that a layout cannot say.
        resumed: layout that loads the checkpoint of the first two steps; None: no checkpoint.
        layers: Megatron's local ones, or Transformer Engine's; of the one process too.
    """

    name: str
    layout: str
    flags: tuple[str, ...] = ()
    precision: Precision = "fp32"
    optimizer: str = "adam"
    change: Callable[[Plan], Plan] | None = None
    resumed: str | None = None
    layers: str = LOCAL

    @property
    def num_ranks(self) -> int:
        return parse_layout(self.layout).num_devices


def _launched(*counts: int) -> Callable[[Plan], Plan]:
    """Return the change that sets launch counts on the first replica's stages."""

    def change(plan: Plan) -> Plan:
        first, *others = plan.replicas
        stages = tuple(
            replace(stage, num_launched_forwards=count)
            for stage, count in zip(first.stages, counts, strict=True)
        )
        return replace(plan, replicas=(replace(first, stages=stages), *others))

    return change


def _in_groups(plan: Plan) -> Plan:
    """Put each replica, of a single GPU, on a machine alone; two machines are a group."""
    names = ("a", "b", "c")
    replicas = tuple(
        replace(replica, stages=(replace(replica.stages[0], devices=(f"{name}:0",)),))
        for replica, name in zip(plan.replicas, names, strict=True)
    )
    hosts = tuple(Host(name, name, "A100-40GB", (0,)) for name in names)
    return replace(plan, replicas=replicas, hosts=hosts, exchange_groups=(("a", "b"), ("c",)))


def _with_transformer_engine(name: str, layout: str, *flags: str) -> Case:
    # In bf16 alone: on a GPU Transformer Engine multiplies fp32 by TF32
    # (`CUBLAS_COMPUTE_32F_FAST_TF32`) and has no fused attention for it, which its ring needs.
    named = f"Transformer Engine, {name}"
    return Case(named, layout, flags, "bf16", layers=TRANSFORMER_ENGINE)


_DIVIDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FP8 = ("--fp8-format=hybrid", "--fp8-recipe=tensorwise")
_EXPERTS = ("--num-experts=4", "--moe-router-topk=2", "--disable-bias-linear")
CASES = (
    Case("replicas of unlike work", "tp1:4 @2 | tp1:4 @1"),
    Case("ZeRO-1, overlap", "tp1:2 @2 | tp1:2 @1", _DIVIDED),
    Case("bf16, recompute", "tp1:2 @2 | tp1:2 @1", ("--recompute-activations",), "bf16"),
    Case("uneven shares", "tp2(3:1):4 @2"),
    Case("sharded layers", "tp1:4z2 @2 | tp1:4z2 @1", _DIVIDED),
    Case("launched ahead", "tp1:2,tp1:2 @6", change=_launched(4, 1)),
    Case(
        "interleaved chunks",
        "tp1:2,tp1:2 @4",
        change=lambda plan: with_interleaving(plan, 0, [(0, 1), (1, 1), (0, 1), (1, 1)]),
    ),
    Case(
        "split backward passes",
        "tp1:2,tp1:2 @4",
        change=lambda plan: with_zero_bubble(plan, 0, [3, 2]),
    ),
    Case("unlike widths", "tp2:1,tp1:1 @3"),
    Case("sequence parallel", "tp2:2 @2 | tp1:2 @1", ("--sequence-parallel", *_DIVIDED)),
    Case("context parallel", "tp1cp2:2 @2 | tp1:2 @1"),
    Case("experts gathered", "tp2ep2:2,tp1:2 @2", ("--sequence-parallel", *_EXPERTS)),
    Case(
        "experts exchanged",
        "tp2ep2:2,tp1:2 @2",
        ("--sequence-parallel", "--moe-token-dispatcher-type=alltoall", *_EXPERTS),
    ),
    Case("resumed as another plan", "tp2:1,tp1:1 @3", _DIVIDED, resumed="tp1:2 @2 | tp1:2 @1"),
    Case("exchange by groups", "tp1:4 @2 | tp1:4 @1 | tp1:4 @1", change=_in_groups),
    Case("unlike depth", "tp2:1,tp1:1 @2 | tp1:2 @1", _DIVIDED),
    _with_transformer_engine("unlike depth", "tp2:1,tp1:1 @2 | tp1:2 @1", *_DIVIDED),
    _with_transformer_engine("replicas of unlike work", "tp1:2 @2 | tp1:2 @1"),
    _with_transformer_engine(
        "sequence parallel", "tp2:2 @2 | tp1:2 @1", "--sequence-parallel", *_DIVIDED
    ),
    _with_transformer_engine("ring of context parallelism", "tp1cp2:2 @2 | tp1:2 @1"),
    _with_transformer_engine(
        "experts exchanged",
        "tp2ep2:2,tp1:2 @2",
        "--sequence-parallel",
        "--moe-token-dispatcher-type=alltoall",
        "--moe-grouped-gemm",
        *_EXPERTS,
    ),
    _with_transformer_engine(
        "fp8 tensorwise", "tp2:1,tp1:1 @2 | tp1:2 @1", "--sequence-parallel", *FP8
    ),
)
"""Local layers from few ranks to many, then Transformer Engine's."""
_SHORT = "replicas of unlike work"


def cases_for(machine: Machine, is_short: bool) -> tuple[Case, ...]:
    """Return the cases that this machine tries: all, whatever the number of its GPUs, because
    ranks share cards; in the short check one."""
    return tuple(case for case in CASES if not is_short or case.name == _SHORT)
