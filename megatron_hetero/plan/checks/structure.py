"""Invariants of a plan by itself: sizes, shapes, layers, micro-batches, recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron_hetero.model.spec import MAX_LAYERS
from megatron_hetero.plan.checks.violation import (
    Violation,
    layer_range,
    stage_key,
    stage_name,
    stages,
)
from megatron_hetero.plan.layout import (
    MAX_CONTEXT_PARALLEL,
    MAX_EXPERT_PARALLEL,
    MAX_MICRO_BATCH_SIZE,
    MAX_MICRO_BATCHES,
    MAX_SHARE,
    MAX_TENSOR_PARALLEL,
)
from megatron_hetero.plan.plan import PLAN_SCHEMA_VERSION, Plan


def known_schema_version(plan: Plan) -> Iterator[Violation]:
    """Find a plan of another version of the file format."""
    if plan.schema_version != PLAN_SCHEMA_VERSION:
        yield Violation(
            ("schema_version",),
            f"schema_version is {plan.schema_version}; this version of megatron-hetero reads "
            f"{PLAN_SCHEMA_VERSION}. Plan again, or use the version that made the plan.",
        )


def something_to_run(plan: Plan) -> Iterator[Violation]:
    """Find a plan without replicas and replicas without stages."""
    if not plan.replicas:
        yield Violation(("replicas",), "the plan has no replica; at least one is needed.")
    for r, replica in enumerate(plan.replicas):
        if not replica.stages:
            yield Violation(("replicas", r, "stages"), f"replica {r} has no stage; give it one.")


def numbers_in_bounds(plan: Plan) -> Iterator[Violation]:
    """Find counts and sizes below 1 or above the largest allowed."""
    for r, replica in enumerate(plan.replicas):
        where = f"replica {r}"
        yield from _bounded(
            ("replicas", r, "num_micro_batches"),
            where,
            replica.num_micro_batches,
            MAX_MICRO_BATCHES,
        )
        # None takes the size from the job, which bounds its own.
        if replica.micro_batch_size is not None:
            yield from _bounded(
                ("replicas", r, "micro_batch_size"),
                where,
                replica.micro_batch_size,
                MAX_MICRO_BATCH_SIZE,
            )
    for r, s, stage in stages(plan):
        key, where = stage_key(r, s, "shape"), stage_name(r, s)
        width, num_layers = stage.shape.tensor_parallel, stage.shape.num_layers
        yield from _bounded((*key, "tensor_parallel"), where, width, MAX_TENSOR_PARALLEL)
        context = stage.shape.context_parallel
        yield from _bounded((*key, "context_parallel"), where, context, MAX_CONTEXT_PARALLEL)
        yield from _bounded((*key, "num_layers"), where, num_layers, MAX_LAYERS)
        if stage.optimizer_share is not None:
            own = stage_key(r, s, "optimizer_share")
            yield from _bounded(own, where, stage.optimizer_share, MAX_SHARE)


def _bounded(
    keypath: tuple[str | int, ...], where: str, value: int, maximum: int
) -> Iterator[Violation]:
    if not 1 <= value <= maximum:
        yield Violation(keypath, f"{where}: {keypath[-1]} is {value}; allowed is 1 to {maximum}.")


def expert_groups_are_two_sizes(plan: Plan) -> Iterator[Violation]:
    """Find `expert_groups` that are not an expert-parallel size and a width, each in its bounds."""
    for r, s, stage in stages(plan):
        if stage.shape.expert_groups is None:
            continue
        # A file holds a list of any length, whatever the type says.
        sizes: tuple[int, ...] = tuple(stage.shape.expert_groups)
        key, where = stage_key(r, s, "shape", "expert_groups"), stage_name(r, s)
        if len(sizes) != 2:
            yield Violation(
                key,
                f"{where}: expert_groups has {len(sizes)} numbers; give two, the expert-parallel "
                "size and the expert-tensor-parallel size, as in [4, 1].",
            )
            continue
        for words, size, maximum in (
            ("expert-parallel", sizes[0], MAX_EXPERT_PARALLEL),
            ("expert-tensor-parallel", sizes[1], MAX_TENSOR_PARALLEL),
        ):
            if not 1 <= size <= maximum:
                yield Violation(
                    key,
                    f"{where}: expert_groups has the {words} size {size}; allowed is 1 to "
                    f"{maximum}.",
                )


def shares_fit_widths(plan: Plan) -> Iterator[Violation]:
    """Find shares that are not a number from 1 to `MAX_SHARE` for each tensor-parallel or
    context-parallel rank."""
    for r, s, stage in stages(plan):
        shape = stage.shape
        # (field, what it divides, how many parts there are).
        for field, words, size in (
            ("shares", "tensor-parallel width", shape.tensor_parallel),
            ("context_shares", "context-parallel size", shape.context_parallel),
            ("expert_shares", "tensor-parallel width", shape.tensor_parallel),
        ):
            shares = getattr(shape, field)
            if shares is None:
                continue
            key = stage_key(r, s, "shape", field)
            if len(shares) != size:
                each = "group" if field == "context_shares" else "device"
                yield Violation(
                    key,
                    f"{stage_name(r, s)}: {len(shares)} {field} for {words} {size}; "
                    f"give one for each {each}.",
                )
            for share in shares:
                if not 1 <= share <= MAX_SHARE:
                    yield Violation(
                        key, f"{stage_name(r, s)}: share {share}; allowed is 1 to {MAX_SHARE}."
                    )


def layers_follow_each_other(plan: Plan) -> Iterator[Violation]:
    """Find layers between two stages of a replica that are on neither or on both."""
    for r, replica in enumerate(plan.replicas):
        if any(stage.chunks for stage in replica.stages):
            continue  # `plan.checks.schedule.chunks_follow_each_other` sees to these.
        # The layer that the next stage has to begin with.
        next_layer = 0
        for s, stage in enumerate(replica.stages):
            first = stage.first_layer
            if first != next_layer:
                between = layer_range(min(first, next_layer), max(first, next_layer) - 1)
                trouble = "on no stage" if first > next_layer else "on two stages"
                yield Violation(
                    stage_key(r, s, "first_layer"),
                    f"{stage_name(r, s)} begins at layer {first}, but layer {next_layer} is due: "
                    f"replica {r} would have {between} {trouble}. "
                    f"Set first_layer to {next_layer}, or change num_layers before it.",
                )
            next_layer = first + stage.shape.num_layers


def replicas_hold_every_layer(plan: Plan) -> Iterator[Violation]:
    """Find replicas that lack layers of the model or, without a model, of the deepest replica."""
    # Without a model the deepest replica says how many layers there are.
    num_held = [r.shape.num_layers for r in plan.replicas]
    if plan.workload is not None:
        num_layers, owner = plan.workload.model.num_layers, "the model"
    else:
        num_layers = max(num_held)
        owner = f"replica {num_held.index(num_layers)}"
    for r, held in enumerate(num_held):
        if held < num_layers:
            verb = "is" if held == num_layers - 1 else "are"
            yield Violation(
                ("replicas", r, "stages"),
                f"replica {r} covers {layer_range(0, held - 1)} of {num_layers}; "
                f"{layer_range(held, num_layers - 1)} {verb} on no stage. "
                f"Every replica holds all layers of {owner}: add the missing ones to its stages.",
            )
        elif held > num_layers:
            yield Violation(
                ("replicas", r, "stages"),
                f"replica {r} covers {layer_range(0, held - 1)}, but {owner} has {num_layers} "
                f"(0-{num_layers - 1}). Take {held - num_layers} from its stages.",
            )


def recompute_is_complete(plan: Plan) -> Iterator[Violation]:
    """Find a number of recomputed layers without full recompute, or of more than the stage has."""
    for r, s, stage in stages(plan):
        # Without a number, full recompute is of all layers of the stage.
        count = stage.recompute_num_layers
        if count is None:
            continue
        key = stage_key(r, s, "recompute_num_layers")
        if stage.recompute != "full":
            yield Violation(
                key,
                f"{stage_name(r, s)}: recompute_num_layers is {count}, but recompute is "
                f"{stage.recompute!r}; it counts layers of 'full' recompute only.",
            )
        elif not 1 <= count <= stage.shape.num_layers:
            yield Violation(
                key,
                f"{stage_name(r, s)}: recompute_num_layers is {count}; "
                f"allowed is 1 to the stage's {stage.shape.num_layers} layers.",
            )


def sizes_are_positive(plan: Plan) -> Iterator[Violation]:
    """Find sizes of the job below the least that a model or a batch can have."""
    if plan.workload is None:
        return
    for part, sizes in (("model", plan.workload.model), ("training", plan.workload.training)):
        # Not `vars`: it has the hash that a hashed value keeps, which may be negative.
        for field in fields(sizes):
            name, size = field.name, getattr(sizes, field.name)
            least = 1 if name in _AT_LEAST_ONE else 0
            if isinstance(size, int) and not isinstance(size, bool) and size < least:
                yield Violation(
                    ("workload", part, name),
                    f"{name} of the job is {size}; it is at least {least}. Plan again with the "
                    "job's own number.",
                )


_AT_LEAST_ONE = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
        *("num_query_groups", "kv_channels", "vocab_size", "make_vocab_size_divisible_by"),
        *("seq_length", "global_batch_size", "micro_batch_size"),
    }
)

INVARIANTS = (
    known_schema_version,
    sizes_are_positive,
    something_to_run,
    numbers_in_bounds,
    expert_groups_are_two_sizes,
    shares_fit_widths,
    layers_follow_each_other,
    replicas_hold_every_layer,
    recompute_is_complete,
)
