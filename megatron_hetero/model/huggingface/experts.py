"""Experts: how many, in which layers, and how a router chooses among them."""

from __future__ import annotations

from megatron_hetero.model.huggingface.config import DecoderConfig, RoutedKeys
from megatron_hetero.model.huggingface.writer import FlagWriter, layer_pattern

_KINDS = ("dense", "sparse")


def few_experts(writer: FlagWriter, config: DecoderConfig) -> None:
    """Write the experts of Mixtral and GPT-OSS: as wide as the file's MLP, in all layers."""
    writer.add("num_local_experts", "--num-experts", config.num_experts)
    writer.add("num_experts_per_tok", "--moe-router-topk", config.num_experts_per_tok)
    # Megatron's default of 0 balances nothing.
    if config.router_aux_loss_coef is not None:
        coefficient = repr(config.router_aux_loss_coef)
        writer.add("router_aux_loss_coef", "--moe-router-load-balancing-type", "aux_loss")
        writer.add("router_aux_loss_coef", "--moe-aux-loss-coeff", coefficient)
        if config.router_aux_loss_coef and not config.output_router_logits:
            writer.differ(
                f"experts are balanced with router_aux_loss_coef {coefficient}, which Hugging "
                "Face's own training adds only with output_router_logits"
            )


def qwen_experts(writer: FlagWriter, config: DecoderConfig) -> None:
    """Write the experts of Qwen 2 and 3: some layers may be dense, and a shared expert has a
    gate."""
    few_experts(writer, config)
    writer.add("moe_intermediate_size", "--moe-ffn-hidden-size", config.moe_intermediate_size)
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    # `transformers` counts layers from 1 here: with step 2 the second layer is sparse.
    pattern = [
        int((layer + 1) % step == 0 and layer not in dense)
        for layer in range(config.num_hidden_layers)
    ]
    if 0 in pattern:
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        writer.add(key, "--moe-layer-freq", layer_pattern(pattern))
    if config.shared_expert_intermediate_size:
        writer.add(
            "shared_expert_intermediate_size",
            "--moe-shared-expert-intermediate-size",
            config.shared_expert_intermediate_size,
            "--moe-shared-expert-gate",
        )
    if not config.norm_topk_prob:
        # The chosen experts' weights keep the size that they have among all.
        writer.add("norm_topk_prob", "--moe-router-pre-softmax")


def routed_experts(
    writer: FlagWriter, config: RoutedKeys, num_layers: int, ffn_hidden_size: int
) -> None:
    """Write the experts of DeepSeek, Kimi, GLM and dots: the first layers may be dense.

    Args:
        writer: for the flags.
        config: the keys.
        num_layers: of the model.
        ffn_hidden_size: of its dense layers, and of an expert where the file does not say.
    """
    if config.n_routed_experts is None:
        return
    # Widths are of one expert; the shared ones are one MLP as wide as all of them together.
    columns = config.moe_intermediate_size or ffn_hidden_size
    writer.add("n_routed_experts", "--num-experts", config.n_routed_experts)
    writer.add("moe_intermediate_size", "--moe-ffn-hidden-size", columns)
    if config.num_experts_per_tok is None:
        writer.refuse("num_experts_per_tok", "is missing; add it: the experts that a token goes to")
    writer.add("num_experts_per_tok", "--moe-router-topk", config.num_experts_per_tok)
    key, pattern = _sparse_layers(writer, config, num_layers)
    if 0 in pattern:
        writer.add(key, "--moe-layer-freq", layer_pattern(pattern))
    if config.n_shared_experts:
        shared = config.n_shared_experts * columns
        writer.add("n_shared_experts", "--moe-shared-expert-intermediate-size", shared)
    # The files of dots name its method twice; its class has sigmoid.
    scores = "sigmoid" if config.scoring_func == "noaux_tc" else config.scoring_func
    writer.require("scoring_func", scores, "softmax", "sigmoid")
    writer.add("scoring_func", "--moe-router-score-function", scores)
    if scores == "sigmoid":
        # Megatron divides the scores of the chosen by their sum, always.
        writer.require("norm_topk_prob", config.norm_topk_prob, True)
    elif not config.norm_topk_prob:
        writer.add("norm_topk_prob", "--moe-router-pre-softmax")
    writer.require("topk_method", config.topk_method, "greedy", "noaux_tc", "group_limited_greedy")
    # One group is no restriction, and "greedy" ignores groups.
    if (config.n_group or 1) > 1 and config.topk_group and config.topk_method != "greedy":
        writer.add("n_group", "--moe-router-num-groups", config.n_group)
        writer.add("topk_group", "--moe-router-group-topk", config.topk_group)
        if config.topk_method == "group_limited_greedy":
            writer.differ("a group of experts is chosen by the sum of its best, not by the best")
    # `noaux_tc` balances experts by a bias on the choice, not by a loss.
    writer.switch(
        "topk_method", "--moe-router-enable-expert-bias", config.topk_method == "noaux_tc"
    )
    if config.routed_scaling_factor not in (None, 1.0):
        writer.add(
            "routed_scaling_factor",
            "--moe-router-topk-scaling-factor",
            config.routed_scaling_factor,
        )


def further_tokens(writer: FlagWriter, config: RoutedKeys) -> None:
    """Note layers that predict further tokens: a job asks for them by --mtp-num-layers."""
    if config.num_nextn_predict_layers:
        writer.differ(
            f"{config.num_nextn_predict_layers} layers that predict further tokens are left out"
        )


def _sparse_layers(
    writer: FlagWriter, config: RoutedKeys, num_layers: int
) -> tuple[str, list[int]]:
    """Return the deciding key, and for each layer 1 if the layer has experts, else 0."""
    key, kinds = "mlp_layer_types", config.mlp_layer_types
    # Without a list, the first layers are dense, and then every so many have experts.
    if kinds is None:
        first, every = config.first_k_dense_replace, config.moe_layer_freq
        return "first_k_dense_replace", [
            int(layer >= first and layer % every == 0) for layer in range(num_layers)
        ]
    if len(kinds) != num_layers:
        writer.refuse(key, f"names {len(kinds)} layers; num_hidden_layers is {num_layers}")
    for kind in kinds:
        writer.require(key, kind, *_KINDS)
    return key, [_KINDS.index(kind) for kind in kinds]
