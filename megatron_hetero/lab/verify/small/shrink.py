"""A model small enough to train on this machine, for a plan with unchanged shape.

Kept: replicas, stages, tensor-parallel widths, shares, micro-batch counts and sizes, and every
choice of architecture (tied embeddings, gated MLP, grouped queries, norms, biases, positions,
sequence parallelism, recompute, per-token loss). Shrunk: sizes, and the number of layers where each
stage can still have one. `small.job_flags` treats the job's other flags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from megatron_hetero.lab.verify.small.architecture import architecture_flags
from megatron_hetero.lab.verify.small.fewer_layers import with_fewer_layers
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.plan import Layout, Plan
from megatron_hetero.schedule.stock import is_stock

MAX_LAYERS = 8
_HEAD_SIZE = 8
_MIN_HIDDEN = 32
_MAX_EXPERTS = 8
"""Most experts of the small model, unless a stage deals more experts out."""
_MIN_SEQUENCE = 32
_MAX_UNIT = 32
"""Query groups that shares may ask for; each is four heads at most, and all of them the width of
the model."""
RECOMPUTE_FLAGS = (
    "--recompute-activations",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
)


@dataclass(frozen=True)
class Shrunk:
    """The plan with fewer layers, and the Megatron flags of the small model.

    `vocab_multiple` is the one process's `--make-vocab-size-divisible-by`: the padding of the
    vocabulary that the plan's ranks have together. `plan_args` are flags of the plan's runs only.
    """

    plan: Plan
    model: ModelSpec
    global_batch_size: int
    model_args: tuple[str, ...]
    vocab_multiple: int
    changes: tuple[str, ...]
    plan_args: tuple[str, ...] = ()
    micro_batch_size: int = 1


def shrink(plan: Plan, workload: Workload, max_layers: int = MAX_LAYERS) -> Shrunk:
    """Reduce `workload` to a size that a CPU trains in a fraction of a second a step.

    Args:
        plan: the plan, whose shape stays.
        workload: the job.
        max_layers: most layers of the small model.
    """
    small_plan = with_fewer_layers(plan, max_layers)
    model, training = workload.model, workload.training
    # The least number of units that all widths and shares divide.
    unit = groups = lcm(*plan.layout.tensor_parallel_widths, *_share_totals(plan.layout))
    if unit > _MAX_UNIT:
        # Shares that divide nothing small are rounded, as they are in the job itself.
        unit = lcm(*plan.layout.tensor_parallel_widths)
        groups = _multiple(min(model.num_query_groups, _MAX_UNIT), unit)
    # Grouped queries stay grouped, with few of them.
    queries_per_group = min(model.num_attention_heads // model.num_query_groups, 4)
    # Enough heads for a hidden size at which rounding behaves as usual.
    if model.num_query_groups == model.num_attention_heads:
        while groups * _HEAD_SIZE < _MIN_HIDDEN:
            groups += unit
    heads = groups * queries_per_group
    hidden = heads * _HEAD_SIZE
    ffn = _multiple(2 * hidden, unit)
    sequence = _multiple(_MIN_SEQUENCE, _sequence_unit(plan, unit, training.sequence_parallel))
    # Batches are the plan's.
    num_layers = small_plan.layout.replicas[0].num_layers
    micro_batch = micro_batch_size(plan, workload)
    batch = sum(r.num_micro_batches * (r.micro_batch_size or micro_batch) for r in plan.replicas)
    flags = {
        "num-layers": num_layers,
        "hidden-size": hidden,
        "ffn-hidden-size": ffn,
        "num-attention-heads": heads,
        "seq-length": sequence,
        "max-position-embeddings": sequence,
        "micro-batch-size": micro_batch,
        "global-batch-size": batch,
        "normalization": model.normalization,
        "position-embedding-type": model.position_embedding,
        "attention-dropout": 0,
        "hidden-dropout": 0,
    }
    args = [f"--{name}={value}" for name, value in flags.items()]
    # The same sizes as a model, with the job's architecture.
    num_experts = _num_experts(plan, model)
    latents = _latent_sizes(model, unit)
    has_shared_expert = model.moe_shared_expert_intermediate_size > 0
    small = replace(
        model,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=_HEAD_SIZE,
        num_experts=num_experts,
        moe_router_topk=min(model.moe_router_topk, num_experts),
        moe_ffn_hidden_size=ffn if model.num_experts else 0,
        moe_shared_expert_intermediate_size=ffn if has_shared_expert else 0,
        moe_layer_freq=_sparse_layers(model, num_layers) if model.moe_layer_freq else (),
        seq_length=sequence,
        divides_latents=bool(latents),
        **latents,
    )
    args += architecture_flags(small, workload)
    if training.sequence_parallel:
        args.append("--sequence-parallel")
    if training.per_token_loss:
        args.append("--calculate-per-token-loss")
    if not decides_recompute(small_plan):
        args += _recompute(training)
    # What a reader should know has changed.
    changes = [
        f"{f} {getattr(model, f)} -> {getattr(small, f)}"
        for f in _SHOWN
        if getattr(model, f) != getattr(small, f)
    ]
    dropout = {training.attention_dropout, training.hidden_dropout} - {0.0}
    if dropout:
        changes.append(f"dropout {max(dropout)} -> 0")
    size = training.micro_batch_size
    if micro_batch != size:
        changes.append(f"micro_batch_size {size} -> {micro_batch} (the plan's)")
    # Any small number: Megatron pads by it times the TP width.
    divisor = 4
    return Shrunk(
        small_plan,
        small,
        batch,
        (*args, f"--make-vocab-size-divisible-by={divisor}"),
        divisor * lcm(*plan.layout.tensor_parallel_widths),
        tuple(changes),
        ("--use-distributed-optimizer",) if training.use_distributed_optimizer else (),
        micro_batch,
    )


_SHOWN = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)


def micro_batch_size(plan: Plan, workload: Workload) -> int:
    """Return the one process's sequences in a micro-batch: those of all replicas, if equal.

    Where losses are masked, the mean over micro-batches of another size is another objective.
    Replicas of unlike sizes have losses per token, whose sum no division changes.
    """
    sizes = {r.micro_batch_size or workload.training.micro_batch_size for r in plan.replicas}
    return sizes.pop() if len(sizes) == 1 else workload.training.micro_batch_size


def decides_recompute(plan: Plan) -> bool:
    """Tell if this is a stock plan whose stages replace the job's recompute flags."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    return any(stage.recompute is not None for stage in stages) and is_stock(plan)


def _recompute(training: TrainingSpec) -> list[str]:
    flags = []
    if training.recompute != "none":
        flags.append(f"--recompute-granularity={training.recompute}")
    if training.recompute == "full":
        flags += ["--recompute-method=uniform", "--recompute-num-layers=1"]
    # The activation of grouped experts, which local layers have not, is no module of theirs.
    if modules := [name for name in training.recompute_modules if name != "moe_act"]:
        flags += ["--recompute-modules", *modules]
    return flags


def _sparse_layers(model: ModelSpec, num_layers: int) -> tuple[int, ...]:
    """Choose the layers with experts of the small model: as in the real one at the same depth, and
    at least one of each kind."""
    real = model.moe_layer_freq
    # Each small layer looks at the real layer of the same relative depth.
    pattern = [real[i * len(real) // num_layers] for i in range(num_layers)]
    # Experts in the last layer, none in the first one, if the choice left a kind out.
    for kind, place in ((1, -1), (0, 0)):
        if kind in real and kind not in pattern and num_layers > 1:
            pattern[place] = kind
    return tuple(pattern)


def _latent_sizes(model: ModelSpec, unit: int) -> dict[str, Any]:
    """Return the small sizes of multi-latent attention, which every width divides."""
    if not model.kv_lora_rank:
        return {}
    rank = _multiple(2 * _HEAD_SIZE, unit)
    # Even, and with the rank a multiple of the unit; heads of unlike widths, as the real ones.
    rotary = lcm(2, unit) if unit < _HEAD_SIZE else 2 * unit
    return {
        "q_lora_rank": rank if model.q_lora_rank else 0,
        "kv_lora_rank": rank,
        "qk_head_dim": _HEAD_SIZE,
        "qk_pos_emb_head_dim": rotary,
        "v_head_dim": _HEAD_SIZE + 4,
    }


def _num_experts(plan: Plan, model: ModelSpec) -> int:
    """Return the experts of the small model: few, and as many as any stage can deal out."""
    shapes = [stage for replica in plan.layout.replicas for stage in replica.stages]
    # A stage that deals experts out needs a multiple of its table's length.
    tables = [len(table) for shape in shapes if (table := shape.expert_shares)]
    unit = lcm(*tables, *(shape.expert_groups[0] for shape in shapes if shape.expert_groups))
    return min(model.num_experts, _multiple(_MAX_EXPERTS, unit))


def _sequence_unit(plan: Plan, unit: int, sequence_parallel: bool) -> int:
    """Return the number that has to divide the length of a sequence."""
    parts = unit if sequence_parallel else 1
    shapes = [s for r in plan.layout.replicas for s in r.stages if s.context_parallel > 1]
    # Unlike shares that divide nothing small are rounded, as they are in the job itself.
    shares = [sum(s.uneven_context_shares or ()) for s in shapes]
    exact = (2 * total * parts for total in shares if 0 < total <= _MAX_UNIT)
    return lcm(parts, *(2 * shape.context_parallel * parts for shape in shapes), *exact)


def _share_totals(layout: Layout) -> list[int]:
    return [sum(s.shares) for r in layout.replicas for s in r.stages if s.shares is not None]


def _multiple(least: int, unit: int) -> int:
    return -(-least // unit) * unit
