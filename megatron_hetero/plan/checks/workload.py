"""Invariants of a plan against its workload: widths that divide the model, batches that add up."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.plan.checks.violation import Violation, stage_key, stage_name, stages
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.sharding.expert_groups import expert_peers, stages_in_group
from megatron_hetero.plan.sharding.token_shares import token_counts


def divided_sizes(model: ModelSpec) -> tuple[tuple[str, str, int], ...]:
    """Return the sizes that tensor parallelism divides: (words, Megatron's flag, units). The
    vocabulary is padded."""
    sizes = [
        ("attention heads", "--num-attention-heads", model.num_attention_heads),
        ("query groups", "--num-query-groups", model.num_query_groups),
    ]
    if model.num_experts:
        sizes.append(("columns of an expert", "--moe-ffn-hidden-size", model.moe_ffn_hidden_size))
    if model.moe_shared_expert_intermediate_size:
        flag = "--moe-shared-expert-intermediate-size"
        shared = model.moe_shared_expert_intermediate_size
        sizes.append(("columns of the shared expert", flag, shared))
    if not model.num_experts or model.moe_layer_freq:
        sizes.append(("MLP columns", "--ffn-hidden-size", model.ffn_hidden_size))
    return tuple(sizes)


def widths_divide_the_model(plan: Plan) -> Iterator[Violation]:
    """Find widths and shares that do not divide the model's heads, columns or groups."""
    if plan.workload is None:
        return
    for r, s, stage in stages(plan):
        width, shares = stage.shape.tensor_parallel, stage.shape.shares
        key = stage_key(r, s, "shape", "tensor_parallel")
        # Shares do not change the parts of latents, so the width has to divide these.
        for size in plan.workload.model.divided_latents:
            if size % width:
                yield Violation(
                    key,
                    f"{stage_name(r, s)}: tensor-parallel width {width} does not divide the "
                    f"{size} latents (--q-lora-rank; --kv-lora-rank + --qk-pos-emb-head-dim), "
                    "which Megatron's local layers divide evenly. Use another width, or "
                    "--transformer-impl transformer_engine.",
                )
        # Units that stay whole on a device: a head, a group of keys and values, a column.
        for words, flag, units in divided_sizes(plan.workload.model):
            deals = stage.shape.expert_shares or stage.shape.expert_groups
            if deals and flag == "--moe-ffn-hidden-size":
                continue  # each expert is whole, or divided by a width of its own
            # Equal parts need a width that divides; shares only need a unit for each device.
            if shares is None and units % width:
                yield Violation(
                    key,
                    f"{stage_name(r, s)}: tensor-parallel width {width} does not divide the "
                    f"model's {units} {words} ({flag}). Use a width that divides them"
                    + (f", or shares, as in {_example_shares(width)}." if width <= units else "."),
                )
            elif units < width:
                yield Violation(
                    key,
                    f"{stage_name(r, s)}: {units} {words} ({flag}) cannot give each of {width} "
                    "devices one. Use a smaller width.",
                )


def experts_can_be_dealt_out(plan: Plan) -> Iterator[Violation]:
    """Find stages that deal out experts although the model has none, too few, or a number not
    divisible by the width."""
    if plan.workload is None:
        return
    model = plan.workload.model
    for r, s, stage in stages(plan):
        shares, width = stage.shape.expert_shares, stage.shape.tensor_parallel
        if shares is None:
            continue
        key, where = stage_key(r, s, "shape", "expert_shares"), stage_name(r, s)
        if model.num_experts < width:
            had = f"{model.num_experts} experts" if model.num_experts else "no experts"
            yield Violation(
                key,
                f"{where}: ep{width} gives each of {width} devices an expert, and the model has "
                f"{had} (--num-experts). Use a smaller width, or leave ep out.",
            )
        elif len(set(shares)) == 1 and model.num_experts % width:
            # By equal shares experts are dealt out evenly, as stock Megatron does.
            yield Violation(
                key,
                f"{where}: ep{width} does not divide {model.num_experts} experts (--num-experts) "
                f"evenly. Give shares, as in ep{width}({_example_table(width)}), or another width.",
            )


def expert_groups_fit(plan: Plan) -> Iterator[Violation]:
    """Find groups of experts over replicas that the ranks of a stage, or the model, do not divide
    into."""
    model = None if plan.workload is None else plan.workload.model
    for r, s, stage in stages(plan):
        shape = stage.shape
        if shape.expert_groups is None:
            continue
        # `size` groups of experts, each expert of a group divided by `width` ranks.
        size, width = shape.expert_groups
        key = stage_key(r, s, "shape", "expert_groups")
        where = f"{stage_name(r, s)}: ep{size}etp{width}"
        ranks, own = size * width, shape.num_devices
        if shape.expert_shares is not None or shape.shares is not None:
            words = f"{where} does not go together with shares. Leave one of them out."
        elif own % ranks and ranks % own:
            # A group is a part of one stage, or several whole stages of as many replicas.
            words = (
                f"{where} makes groups of {ranks} ranks, and the stage has {own}: groups are equal "
                "parts of a stage, or of whole stages of several replicas. Choose other sizes."
            )
        elif model is not None and (model.num_experts % size or not model.num_experts):
            words = (
                f"{where}: {size} groups of experts do not divide the model's {model.num_experts} "
                "experts (--num-experts). Choose another ep."
            )
        elif model is not None and model.moe_ffn_hidden_size % width:
            words = (
                f"{where}: {width} ranks do not divide the {model.moe_ffn_hidden_size} columns of "
                "an expert (--moe-ffn-hidden-size). Choose another etp."
            )
        else:
            continue
        yield Violation(key, words)


def experts_over_replicas_meet(plan: Plan) -> Iterator[Violation]:
    """Find stages that lack alike ones in other replicas to deal experts out with."""
    for (r, s), peers in expert_peers(plan).items():
        shape = plan.replicas[r].stages[s].shape
        wanted = stages_in_group(shape.expert_groups, shape.num_devices)
        if len(peers) < wanted and r == peers[0]:
            yield Violation(
                stage_key(r, s, "shape", "expert_groups"),
                f"{stage_name(r, s)} ({shape}) deals experts out over {wanted} replicas, but "
                f"only {len(peers)} with an equal stage {s} {'is' if len(peers) == 1 else 'are'} "
                "not in another group. Equal are the same layers, sizes (tp, cp, ep, etp), "
                "micro-batches, order of passes and recompute. Give "
                f"{wanted} replicas the same stage {s}, or choose another ep.",
            )


def _example_table(width: int) -> str:
    return ":".join(["2"] * (width - 1) + ["1"]) if width <= 8 else "2:2:...:1"


def _example_shares(width: int) -> str:
    return f"tp{width}({_example_table(width)})"


def context_parallel_divides(plan: Plan) -> Iterator[Violation]:
    """Find context-parallel sizes that do not divide the sequence into two equal chunks for each
    rank; by unlike shares each has two of its own length."""
    if plan.workload is None:
        return
    seq_length = plan.workload.model.seq_length
    for r, s, stage in stages(plan):
        context, shares = stage.shape.context_parallel, stage.shape.uneven_context_shares
        # Two chunks a rank, one from each end of the sequence, balance the causal mask.
        if shares is not None and (seq_length % 2 or seq_length < 2 * context):
            yield Violation(
                stage_key(r, s, "shape", "context_shares"),
                f"{stage_name(r, s)}: shares of a sequence for {context} groups need a "
                f"--seq-length that is even and at least {2 * context}, not {seq_length}. "
                "Change one of them.",
            )
        elif shares is None and context > 1 and seq_length % (2 * context):
            yield Violation(
                stage_key(r, s, "shape", "context_parallel"),
                f"{stage_name(r, s)}: context-parallel size {context} needs a --seq-length that "
                f"is a multiple of {2 * context}, not {seq_length}. Change one of them.",
            )


def unlike_sequence_shares_are_gathered(plan: Plan) -> Iterator[Violation]:
    """Find unlike shares of sequences in a job with Transformer Engine's attention, which divides
    sequences equally."""
    if plan.workload is None or not plan.workload.training.flash_attention:
        return
    for r, s, stage in stages(plan):
        if stage.shape.uneven_context_shares is not None:
            yield Violation(
                stage_key(r, s, "shape", "context_shares"),
                f"{stage_name(r, s)}: unlike shares of sequences are for Megatron's local layers; "
                "Transformer Engine divides sequences equally. Add --transformer-impl local to the "
                "Megatron flags, or give equal shares.",
            )


def split_passes_are_of_local_layers(plan: Plan) -> Iterator[Violation]:
    """Find backward passes in two parts in a job with Transformer Engine's layers, which make
    weight gradients at once. A job without flags does not say which layers it has."""
    workload = plan.workload
    if workload is None or not workload.megatron_args or not workload.training.flash_attention:
        return
    for r, s, stage in stages(plan):
        if "I" in (stage.order or ""):
            yield Violation(
                stage_key(r, s, "order"),
                f"{stage_name(r, s)}: its order splits backward passes (I and W), for which only "
                "Megatron's local layers can put off weight gradients. Add --transformer-impl "
                "local to the Megatron flags, or take an order without I and W; `schedule` says "
                "what that loses.",
            )


def sequence_parallel_divides(plan: Plan) -> Iterator[Violation]:
    """Find widths that do not divide the tokens of a rank under `--sequence-parallel`."""
    if plan.workload is None or not plan.workload.training.sequence_parallel:
        return
    whole = plan.workload.model.seq_length
    for r, s, stage in stages(plan):
        width, context = stage.shape.tensor_parallel, stage.shape.context_parallel
        # Tokens of a context-parallel rank, which its tensor-parallel ranks divide.
        seq_length = whole // context
        if (shares := stage.shape.uneven_context_shares) is not None:
            tokens = token_counts(whole, shares, width)
            if any(own % width for own in tokens):
                yield Violation(
                    stage_key(r, s, "shape", "context_shares"),
                    f"{stage_name(r, s)}: with --sequence-parallel the width {width} must divide "
                    f"the tokens of every context-parallel rank, which are "
                    f"{', '.join(map(str, tokens))} of --seq-length {whole}. Make it a multiple of "
                    f"{lcm(2, width)} and at least {lcm(2, width) * context}, or drop "
                    "--sequence-parallel.",
                )
        elif context > 1 and not whole % (2 * context) and seq_length % width:
            # Another invariant refuses sequences that context parallelism does not divide.
            yield Violation(
                stage_key(r, s, "shape", "tensor_parallel"),
                f"{stage_name(r, s)}: with --sequence-parallel the width {width} must divide the "
                f"{seq_length} tokens of a context-parallel rank (--seq-length {whole} / "
                f"{context}). Change one of them, or drop --sequence-parallel.",
            )
        elif context == 1 and seq_length % width:
            yield Violation(
                stage_key(r, s, "shape", "tensor_parallel"),
                f"{stage_name(r, s)}: with --sequence-parallel the width {width} must divide "
                f"--seq-length {seq_length}. Change one of them, or drop --sequence-parallel.",
            )


def micro_batches_make_the_global_batch(plan: Plan) -> Iterator[Violation]:
    """Find micro-batches that do not add up to the global batch."""
    if plan.workload is None:
        return
    training = plan.workload.training
    # Sequences a step: micro-batches by their size, which may be the job's.
    parts = [
        (r.num_micro_batches, r.micro_batch_size or training.micro_batch_size)
        for r in plan.replicas
    ]
    total = sum(count * size for count, size in parts)
    if total != training.global_batch_size:
        equation = " + ".join(f"{count}*{size}" for count, size in parts)
        yield Violation(
            ("replicas",),
            f"the replicas' micro-batches make {equation} = {total} sequences, but "
            f"--global-batch-size is {training.global_batch_size}. Change num_micro_batches "
            "(after '@' in a layout) or --global-batch-size.",
        )


def unlike_sizes_are_weighted_by_token(plan: Plan) -> Iterator[Violation]:
    """Find unlike micro-batch sizes without a loss weighted by token: Megatron's mean over
    micro-batches would weigh a short micro-batch like a long one."""
    if plan.workload is None or plan.workload.training.per_token_loss:
        return
    sizes = [r.micro_batch_size or plan.workload.training.micro_batch_size for r in plan.replicas]
    for r, size in enumerate(sizes):
        if size != sizes[0]:
            yield Violation(
                ("replicas", r, "micro_batch_size"),
                f"replica {r} has micro-batch size {size}, replica 0 has {sizes[0]}: unlike sizes "
                "need --calculate-per-token-loss among the Megatron flags.",
            )


INVARIANTS = (
    widths_divide_the_model,
    experts_can_be_dealt_out,
    expert_groups_fit,
    experts_over_replicas_meet,
    context_parallel_divides,
    unlike_sequence_shares_are_gathered,
    split_passes_are_of_local_layers,
    sequence_parallel_divides,
    micro_batches_make_the_global_batch,
    unlike_sizes_are_weighted_by_token,
)
