"""Random jobs for `verify`: a generated plan, and one feature that no plan's values have.

`plan_generator` draws plans and models; a `Feature` adds what came later to plans, models, data,
optimizers and precision. Every feature comes in turn, in a random order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan, Stage
from tests.runtime.all_pairs import Space
from tests.runtime.on_machines import placed
from tests.runtime.plan_features import SPACE
from tests.runtime.plan_generator import Case, cases

STEPS = 3
MOST_RANKS = 5
"""Most processes of a plan: two cores train them in a few seconds."""
Change = Callable[[random.Random, Plan], Plan | None]


@dataclass(frozen=True)
class Feature:
    """Flags of a job beside a plan of some `values`, and a change of the plan.

    `change` returns None if the plan has no place for the feature.
    """

    flags: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    change: Change = lambda drawn, plan: plan


@dataclass(frozen=True)
class Job:
    """A plan and a job to verify; `case` has the values of both beside the `feature`."""

    number: int
    case: Case
    feature: str
    plan: Plan
    workload: Workload
    options: Options


def _each_stage(plan: Plan, change: Callable[[Stage], Stage]) -> Plan:
    replicas = tuple(replace(r, stages=tuple(map(change, r.stages))) for r in plan.replicas)
    return replace(plan, replicas=replicas)


def _own_precisions(drawn: random.Random, plan: Plan) -> Plan | None:
    made = _each_stage(plan, lambda s: replace(s, precision=drawn.choice(("bf16", "fp16", "fp32"))))
    return made if len({s.precision for r in made.replicas for s in r.stages}) > 1 else None


def _optimizer_shares(drawn: random.Random, plan: Plan) -> Plan | None:
    return _each_stage(plan, lambda s: replace(s, optimizer_share=drawn.randint(1, 3)))


def _dealt_experts(drawn: random.Random, plan: Plan) -> Plan | None:
    """Deal whole experts out to the devices of every wide stage, in unlike parts."""

    def dealt(stage: Stage) -> Stage:
        width = stage.shape.tensor_parallel
        if width == 1:
            return stage
        table = tuple(drawn.randint(1, 3) for _ in range(width))
        return replace(stage, shape=replace(stage.shape, expert_shares=table))

    made = _each_stage(plan, dealt)
    return None if made == plan else made


def _grouped_machines(drawn: random.Random, plan: Plan) -> Plan | None:
    """Put each replica on a machine of its own, and the machines in two groups."""
    names = [f"m{r}" for r in range(len(plan.replicas))]
    if len(names) < 2:
        return None
    cut = drawn.randint(1, len(names) - 1)
    groups = [names[:cut], names[cut:]]
    uplinks = [[drawn.randint(1, 3) for _ in g] for g in groups] if drawn.random() < 0.5 else []
    return placed(plan, names, groups, uplinks)


def _layout_of(*layouts: str) -> Change:
    """Return a change that takes one of some layouts in the place of the plan."""
    return lambda drawn, plan: plan_from_layout(parse_layout(drawn.choice(layouts)))


_ROTARY = {"positions": "rotary"}
_EXPERTS = {"MLP": "experts"}
_DENSE = {"MLP": "GELU"}
_PLAIN = {
    "context parallel": "off", "schedule": "1F1B", "recompute": "none", "sizes": "divide",
    "micro-batch size": "1", "resume": "no", "stages": "2",
}  # fmt: skip
"""Values of a case whose layout is replaced."""
_LATENT = (
    "--multi-latent-attention --q-lora-rank=24 --kv-lora-rank=24 --qk-head-dim=8 "
    "--qk-pos-emb-head-dim=4 --v-head-dim=12 --normalization=RMSNorm"
)
_WITH_LATENTS = {
    "attention": "all heads", "sizes": "divide", "positions": "rotary", "biases": "none",
}  # fmt: skip
FEATURES: Mapping[str, Feature] = {
    "none": Feature(),
    "further tokens": Feature("--mtp-num-layers=1", _ROTARY),
    "two further tokens": Feature("--mtp-num-layers=2", {**_ROTARY, "embeddings": "untied"}),
    "latent attention": Feature(f"{_LATENT} --rope-type=rope", _WITH_LATENTS),
    "latent attention, YaRN": Feature(
        f"{_LATENT} --rope-type=yarn --mscale=3 --rotary-scaling-factor=4", _WITH_LATENTS
    ),
    "packed documents": Feature("--dataloader-inter-document-masking"),
    "documents apart": Feature("--reset-position-ids --reset-attention-mask"),
    "windows": Feature("--window-size=4,0 --window-attn-skip-freq=2"),
    "softmax with offset": Feature("--softmax-type=learnable", {"recompute": "none"}),
    "gated attention": Feature("--attention-output-gate"),
    "scaled rotation": Feature("--use-rope-scaling --rotary-percent=0.5", _ROTARY),
    "muP": Feature("--use-mup --mup-base-hidden-size=16"),
    "squared ReLU": Feature("--squared-relu", _DENSE),
    "quick GeGLU": Feature("--quick-geglu", _DENSE),
    "own rates": Feature(
        "--decoupled-lr=0.1 --decoupled-min-lr=0.05 --lr-decay-style=linear --lr-warmup-iters=1 "
        "--train-iters=8"
    ),
    "growing decay": Feature(
        "--start-weight-decay=0 --end-weight-decay=0.9 --weight-decay-incr-style=linear",
        {"weight decay": "0"},
    ),
    "bf16": Feature("--bf16"),
    "fp16": Feature("--fp16"),
    "bf16, experts": Feature("--bf16", {**_EXPERTS, "resume": "no"}),
    "precisions of stages": Feature("--bf16", {"resume": "no"}, _own_precisions),
    "shares of the optimizer": Feature("", {"optimizer state": "divided"}, _optimizer_shares),
    "groups of machines": Feature("", {"replicas": "3"}, _grouped_machines),
    "groups of machines, divided": Feature(
        "", {"replicas": "2", "optimizer state": "divided"}, _grouped_machines
    ),
    "sharded layers": Feature(
        "--num-layers=4",
        {**_PLAIN, "optimizer state": "divided", "replicas": "2"},
        _layout_of("tp2:4z2 @4 | tp1:4z2 @2", "tp1:2z2,tp1:2z1 @3 | tp1:2z2,tp1:2z1 @3",
                   "tp3(2:1:1):4z3 @4 | tp1:4z3 @2"),
    ),
    "shared expert": Feature(
        "--moe-shared-expert-intermediate-size=48 --moe-shared-expert-gate", _EXPERTS
    ),
    "experts in some layers": Feature("--moe-layer-freq=2", _EXPERTS),
    "experts chosen by sigmoid": Feature(
        "--moe-router-score-function=sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate=0.1", _EXPERTS,
    ),
    "groups of experts": Feature(
        "--moe-router-num-groups=2 --moe-router-group-topk=1 --moe-router-topk=2", _EXPERTS
    ),
    "capacity of experts": Feature("--moe-expert-capacity-factor=0.6", _EXPERTS),
    "balanced by sequence": Feature(
        "--moe-router-load-balancing-type=seq_aux_loss", _EXPERTS
    ),
    "balanced by sinkhorn": Feature(
        "--moe-router-load-balancing-type=sinkhorn --moe-aux-loss-coeff=0 --moe-router-topk=1",
        _EXPERTS,
    ),
    "experts dealt out": Feature("--num-experts=12", _EXPERTS, _dealt_experts),
    "experts dealt out, all to all": Feature(
        "--num-experts=12 --moe-token-dispatcher-type=alltoall", _EXPERTS, _dealt_experts
    ),
    "experts and further tokens": Feature("--mtp-num-layers=1", {**_EXPERTS, **_ROTARY}),
    "experts over replicas": Feature(
        "--num-layers=4",
        {**_PLAIN, **_EXPERTS, "replicas": "2"},
        _layout_of("tp1ep2:3,tp2:1 @3 | tp1ep2:3,tp1:1 @3", "tp2:2,tp1ep2:2 @3 | tp1:2,tp1ep2:2 @3",
                   "tp1ep1etp2:2,tp1:2 @3 | tp1ep1etp2:2,tp2:2 @3"),
    ),
}  # fmt: skip
"""Feature -> what a job with it has."""


def jobs(seed: int, space: Space = SPACE) -> Iterator[Job]:
    """Yield jobs without end, the same ones for the same seed."""
    drawn = random.Random(f"jobs/{seed}")
    names = list(FEATURES)
    drawn.shuffle(names)
    turns = cycle(names)
    wanted = next(turns)

    def fixed(number: int) -> Mapping[str, str]:
        return FEATURES[wanted].values

    number = 0
    for case in cases(seed, space, fixed):
        feature = FEATURES[wanted]
        plan = feature.change(drawn, case.plan)
        if plan is None or plan.layout.num_devices > MOST_RANKS:
            continue
        validate_plan(plan)
        flags = _flags(case, feature)
        workload = load_workload(None, flags, is_planned=False)
        yield Job(number, case, wanted, plan, workload, _options(case, workload))
        number += 1
        wanted = next(turns)


def _flags(case: Case, feature: Feature) -> tuple[str, ...]:
    return (
        *case.model_args,
        "--vocab-size=257",
        f"--optimizer={case.optimizer}",
        "--transformer-impl=local",
        *case.shrunk(case.plan).plan_args,
        *feature.flags.split(),
    )


def _options(case: Case, workload: Workload) -> Options:
    # Choices of experts in half precision are replayed from the first step on, not from the middle.
    replays = workload.training.precision != "fp32" and workload.model.num_experts > 0
    resumes = case.values["resume"] != "no" and not replays
    return Options(
        steps=STEPS,
        optimizers=(case.optimizer,),
        precision=workload.training.precision,
        resumes_after=int(resumes),
    )
