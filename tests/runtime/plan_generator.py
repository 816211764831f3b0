"""Random asymmetric plans with every feature of the runtime, and every pair of features.

`cases(seed)` yields them without end; the first few dozen contain every pair of values of
`plan_features.FACTORS` that is possible, and every third one has uneven shares.  A case is small
enough to train in a second or two on a CPU, and equal to one process whatever it contains
(`tests.runtime.prove`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm

from megatron_hetero.lab.kit.orders import with_interleaving, with_zero_bubble
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.in_flight import default_launched_forwards
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, Plan, Replica
from megatron_hetero.schedule.stock import is_stock
from tests.runtime.all_pairs import Space
from tests.runtime.layout_generator import (
    GLOBAL_BATCH_SIZE,
    equal_contexts,
    random_layout,
    random_parts,
)
from tests.runtime.plan_features import SPACE, TRANSFORMER_ENGINE_SPACE

NUM_STEPS = 5
SAVED_AT = 2
PADDED_VOCABULARY = 48
"""Of the padded vocabulary, under every plan: divisible by all widths."""
_SEQUENCE = 24
_NUM_EXPERTS = 4


@dataclass(frozen=True)
class Case:
    """A plan and how to train it; `second` resumes what the plan has saved at `SAVED_AT`."""

    name: str
    values: Mapping[str, str]
    plan: Plan
    second: Plan | None
    model: ModelSpec
    model_args: tuple[str, ...]

    @property
    def optimizer(self) -> str:
        return self.values["optimizer"]

    def shrunk(self, plan: Plan) -> Shrunk:
        """Return the small job that `verify.processes.jobs` trains, for one of the two plans."""
        divisor = PADDED_VOCABULARY // lcm(*plan.layout.tensor_parallel_widths)
        args = (*self.model_args, f"--make-vocab-size-divisible-by={divisor}")
        return Shrunk(
            plan,
            self.model,
            GLOBAL_BATCH_SIZE,
            args,
            PADDED_VOCABULARY,
            (),
            self._flags_of_the_plan(is_stock(plan)),
        )

    def _flags_of_the_plan(self, is_stock: bool) -> tuple[str, ...]:
        """Flags that one process has no use for.

        Stock Megatron cannot resume a divided state of torch's Adam, which is the one on a CPU.
        """
        state = self.values["optimizer state"] if not is_stock else "whole"
        switches = {
            "--overlap-grad-reduce": self.values["gradient sync"] == "overlapped",
            "--use-distributed-optimizer": state != "whole",
            "--overlap-param-gather": state == "divided, gathers overlapped",
        }
        return tuple(flag for flag, is_on in switches.items() if is_on)


def uneven_in_every_third(number: int) -> dict[str, str]:
    """Return the values that the case of a number has to have: uneven shares, or none."""
    return {"shares": "uneven"} if number % 3 == 0 else {}


def cases(
    seed: int,
    space: Space = SPACE,
    fixed: Callable[[int], Mapping[str, str]] = uneven_in_every_third,
) -> Iterator[Case]:
    """Cases without end, the same ones for the same seed; `fixed` as of `Space.select`."""
    rng = random.Random(seed)

    chosen = space.select(
        rng, fixed, lambda values: _plan(random.Random(0), values, space) is not None
    )
    for number, values in enumerate(chosen):
        plan = _plan(rng, values, space)
        while plan is None:
            plan = _plan(rng, values, space)
        yield Case(
            f"{number}: {format_layout(plan.layout)}",
            values,
            plan,
            _second_plan(rng, values, plan, space),
            _model(values, plan.layout.replicas[0].num_layers),
            _model_args(values, plan.layout.replicas[0].num_layers),
        )


def _plan(
    rng: random.Random, values: Mapping[str, str], space: Space, tries: int = 50
) -> Plan | None:
    """A plan of these values that needs the plug-in; None if there seems to be none."""
    for _ in range(tries):
        least, most = (
            (4, 5) if values["schedule"] != "interleaved" else (int(values["stages"]) + 2, 6)
        )
        layout = _layout(rng, values, rng.randint(least, most), space)
        if layout is None:
            continue
        plan = _with_stage_settings(rng, values, plan_from_layout(layout))
        if values["schedule"] != "1F1B" and not _has_own_schedule(plan):
            continue
        if not is_stock(plan):
            validate_plan(plan)
            return plan
    return None


def _layout(
    rng: random.Random, values: Mapping[str, str], num_layers: int, space: Space
) -> Layout | None:
    """A random layout; Transformer Engine divides sequences in equal parts."""
    layout = random_layout(rng, values, num_layers)
    if layout is not None and space is TRANSFORMER_ENGINE_SPACE:
        return equal_contexts(layout)
    return layout


def _second_plan(
    rng: random.Random, values: Mapping[str, str], first: Plan, space: Space
) -> Plan | None:
    """Another layout of the same model and batch, stock Megatron's own ones too."""
    if values["resume"] == "no":
        return None
    if values["resume"] == "same plan":
        return first
    plan = _another_plan(rng, values, first, space)
    # What experts are refused with is drawn anew beside the generator: all other cases stay.
    aside = random.Random(repr(values))
    while values["MLP"] == "experts" and not _trains_experts(plan):
        plan = _another_plan(aside, values, first, space)
    return plan


def _trains_experts(plan: Plan) -> bool:
    """Tell if a plan may resume experts: it has none of the features that
    `plan_features.EXCLUSIONS` excludes."""
    sizes = {replica.micro_batch_size for replica in plan.replicas}
    return not plan.layout.has_context_parallel and sizes == {None}


def _another_plan(rng: random.Random, values: Mapping[str, str], first: Plan, space: Space) -> Plan:
    while True:
        other = {name: rng.choice(named) for name, named in space.factors.items()}
        # What one set of Megatron flags says for both.
        same = ("sizes", "loss", "sequence parallel", "gradient sync")
        other |= {name: values[name] for name in same}
        other["optimizer"] = values["optimizer"]
        if _job_micro_batch_size(other) != _job_micro_batch_size(values):
            continue
        if any(pair in space.excluded for pair in space.pairs_of(other)):
            continue
        num_layers = first.layout.replicas[0].num_layers
        layout = (
            _layout(rng, other, num_layers, space) if int(other["stages"]) <= num_layers else None
        )
        if layout is None or layout == first.layout:
            continue
        plan = _with_stage_settings(rng, other, plan_from_layout(layout))
        validate_plan(plan)
        return plan


def _with_stage_settings(rng: random.Random, values: Mapping[str, str], plan: Plan) -> Plan:
    if values["schedule"] == "interleaved":
        for r, replica in enumerate(plan.replicas):
            chunks = _chunks(rng, len(replica.stages), replica.shape.num_layers)
            # Chunks take their micro-batches in groups of as many as there are stages.
            if chunks and replica.num_micro_batches % len(replica.stages) == 0:
                plan = with_interleaving(plan, r, chunks)
    if values["schedule"] == "zero bubble":
        for r, replica in enumerate(plan.replicas):
            if len(replica.stages) > 1:
                least = range(len(replica.stages), 0, -1)
                plan = with_zero_bubble(plan, r, [n + rng.randint(0, 2) for n in least])
    return replace(
        plan, replicas=tuple(_with_own_settings(rng, values, replica) for replica in plan.replicas)
    )


def _chunks(rng: random.Random, num_stages: int, num_layers: int) -> list[tuple[int, int]]:
    """(stage, layers) along the pipeline: once through all stages, then through some again.

    Empty for a replica of one stage, or of too few layers.
    """
    again = [s for s in range(num_stages - 1) if rng.random() < 0.7] or [0]
    chain = [*range(num_stages), *again, num_stages - 1]
    if num_stages == 1 or len(chain) > num_layers:
        return []
    return list(zip(chain, random_parts(rng, num_layers, len(chain)), strict=True))


def _with_own_settings(rng: random.Random, values: Mapping[str, str], replica: Replica) -> Replica:
    stages = list(replica.stages)
    if values["recompute"] == "of each stage":
        for s, stage in enumerate(stages):
            kind = rng.choice(("none", "selective", "full"))
            some = kind == "full" and rng.random() < 0.5
            count = rng.randint(1, stage.shape.num_layers) if some else None
            stages[s] = replace(stage, recompute=kind, recompute_num_layers=count)
    if values["schedule"] in ("ahead", "one at a time"):
        most = replica.num_micro_batches
        for s, stage in enumerate(stages):
            least = min(len(stages) - s, most)
            count = 1 if values["schedule"] == "one at a time" else rng.randint(least, most)
            stages[s] = replace(stage, num_launched_forwards=count)
            most = count
    return replace(replica, stages=tuple(stages))


def _has_own_schedule(plan: Plan) -> bool:
    """Tell if some stage has chunks, an order, or another launch count than 1F1B's."""
    return any(
        stage.chunks
        or stage.order
        or stage.num_launched_forwards not in (None, default_launched_forwards(plan, r, s))
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
    )


def _job_micro_batch_size(values: Mapping[str, str]) -> int:
    return 2 if values["micro-batch size"] == "2" else 1


def _model(values: Mapping[str, str], num_layers: int) -> ModelSpec:
    """12 query groups fit every width from 1 to 4; 7 fit none but 1."""
    fitting = values["sizes"] == "divide"
    groups = 12 if fitting else 7
    heads = groups * (2 if values["attention"] == "grouped" else 1)
    biases = values["biases"]
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=48,
        ffn_hidden_size=96 if fitting else 82,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=4,
        vocab_size=257,
        seq_length=_SEQUENCE,
        max_position_embeddings=_SEQUENCE,
        gated_mlp=values["MLP"] != "GELU",
        num_experts=_NUM_EXPERTS if values["MLP"] == "experts" else 0,
        moe_router_topk=2 if values["MLP"] == "experts" else 0,
        moe_ffn_hidden_size=(48 if fitting else 41) if values["MLP"] == "experts" else 0,
        tied_embeddings=values["embeddings"] == "tied",
        add_bias_linear=biases == "all",
        add_qkv_bias=biases == "QKV",
        normalization="RMSNorm" if values["norm"] == "RMSNorm" else "LayerNorm",
        position_embedding="rope" if values["positions"] == "rotary" else "learned_absolute",
        qk_layernorm=values["qk-norm"] == "on",
    )


def _model_args(values: Mapping[str, str], num_layers: int) -> tuple[str, ...]:
    model = _model(values, num_layers)
    clip = values["clipping"]
    args = [
        f"--num-layers={num_layers}",
        f"--hidden-size={model.hidden_size}",
        f"--ffn-hidden-size={model.ffn_hidden_size}",
        f"--num-attention-heads={model.num_attention_heads}",
        f"--kv-channels={model.kv_channels}",
        f"--seq-length={model.seq_length}",
        f"--max-position-embeddings={model.max_position_embeddings}",
        f"--normalization={model.normalization}",
        f"--position-embedding-type={model.position_embedding}",
        f"--global-batch-size={GLOBAL_BATCH_SIZE}",
        f"--micro-batch-size={_job_micro_batch_size(values)}",
        "--attention-dropout=0",
        "--hidden-dropout=0",
        f"--weight-decay={values['weight decay']}",
        f"--clip-grad={0 if clip == 'off' else clip}",
    ]
    if model.num_query_groups != model.num_attention_heads:
        args += ["--group-query-attention", f"--num-query-groups={model.num_query_groups}"]
    switches = {
        "--swiglu": model.gated_mlp,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--disable-bias-linear": not model.add_bias_linear,
        "--add-qkv-bias": model.add_qkv_bias,
        "--qk-layernorm": model.qk_layernorm,
        "--sequence-parallel": values["sequence parallel"] == "on",
        "--calculate-per-token-loss": values["loss"] == "per token",
    }
    args += [flag for flag, is_on in switches.items() if is_on]
    if model.num_experts:
        args += [
            f"--num-experts={model.num_experts}",
            f"--moe-ffn-hidden-size={model.moe_ffn_hidden_size}",
            "--moe-aux-loss-coeff=0.01",
            "--moe-z-loss-coeff=0.001",
        ]
    if values["optimizer"] == "adam":
        # By default an update is the sign of the gradient, also where that is rounding noise.
        args.append("--adam-eps=1e-4")
    if values["recompute"] == "full":
        args += ["--recompute-granularity=full", "--recompute-method=uniform"]
        args.append("--recompute-num-layers=1")
    elif values["recompute"] == "selective":
        args.append("--recompute-granularity=selective")
    return tuple(args)
