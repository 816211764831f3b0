"""Correspondence between tensors of Hugging Face and parameters of Megatron's GPT.

A `MappedParameter` names one Megatron parameter and its counterparts. Megatron keeps query, key and
value of a layer in one matrix, group after group: the query heads of a key-value group, then its
key, then its value (`megatron.core.transformer.attention.SelfAttention`). Rotary embeddings rotate
halves in both, so rows keep their places inside a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.model.huggingface import with_class_defaults
from megatron_hetero.model.huggingface.weight_families import LLAMA_LIKE, families_in_words


@dataclass(frozen=True)
class Heads:
    """`query` heads in `groups` key-value groups, `channels` rows each."""

    query: int
    groups: int
    channels: int

    def join(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Join rows of q, k and v ([rows, ...] each) in Megatron's order."""
        rest = q.shape[1:]
        per_group = self.query // self.groups
        # Axis 0: key-value groups. Axis 1: a group's query rows, then its key's, then its value's.
        parts = [
            q.reshape(self.groups, per_group * self.channels, *rest),
            k.reshape(self.groups, self.channels, *rest),
            v.reshape(self.groups, self.channels, *rest),
        ]
        return torch.cat(parts, dim=1).reshape(-1, *rest)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split Megatron's rows into q, k and v; the inverse of `join`."""
        rest = qkv.shape[1:]
        per_group = self.query // self.groups
        grouped = qkv.reshape(self.groups, (per_group + 2) * self.channels, *rest)
        sizes = [per_group * self.channels, self.channels, self.channels]
        q, k, v = (part.reshape(-1, *rest) for part in grouped.split(sizes, dim=1))
        return q, k, v


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of Megatron's, and the tensors with the same numbers.

    `join` makes Megatron's tensor from theirs, in the order of `names`; `split` is its inverse.
    """

    megatron: str
    names: tuple[str, ...]
    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]


def pieces_of(config: Mapping[str, Any]) -> tuple[MappedParameter, ...]:
    """Return all parameters of the model that a `config.json` describes.

    Raises:
        UnsupportedError: Megatron's GPT computes this family, or a part of it, differently, so that
            its weights would mean something else there.
    """
    kind = config.get("model_type")
    if kind in LLAMA_LIKE:
        return tuple(_llama(with_class_defaults(config)))
    if kind == "gpt2":
        return tuple(_gpt2(config))
    # Megatron's GPT has no parallel residual: only the sequential form means the same there.
    if kind == "gpt_neox":
        if config.get("use_parallel_residual", True):
            raise UnsupportedError(
                "gpt_neox with use_parallel_residual: Megatron's GPT runs attention and MLP one "
                "after the other, so these weights would compute something else there"
            )
        return tuple(_neox(config))
    if kind == "opt":
        _need_gelu("opt", config.get("activation_function", "relu"))
        return tuple(_opt(config))
    raise UnsupportedError(
        f"model_type {kind!r}: weights of these families can be converted: {families_in_words()}"
    )


def _llama(config: Mapping[str, Any]) -> Iterator[MappedParameter]:
    heads = _llama_heads(config)
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for i in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        attention = theirs + "self_attn."
        yield _same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight")
        yield _qkv(ours, "weight", attention, heads)
        # Qwen2 has biases on q, k and v without a word in its config; Qwen3 has norms instead.
        if config["model_type"] == "qwen2":
            yield _qkv(ours, "bias", attention, heads)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            for norm in ("q", "k"):
                name = f"{norm}_norm.weight"
                yield _same(f"{ours}self_attention.{norm}_layernorm.weight", attention + name)
        yield _same(ours + "self_attention.linear_proj.weight", attention + "o_proj.weight")
        yield _same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight")
        if config["model_type"] in _EXPERTS:
            yield from _experts(config, ours + "mlp.", theirs)
        else:
            names = ("gate_proj", "up_proj", "down_proj")
            yield from _gated_mlp(ours + "mlp.", theirs + "mlp.", names)
    yield _same("decoder.final_layernorm.weight", "model.norm.weight")
    # A tied output layer is the embedding, and no parameter of its own in Megatron.
    if not config.get("tie_word_embeddings", False):
        yield _same("output_layer.weight", "lm_head.weight")


_EXPERTS = {
    "mixtral": ("block_sparse_moe.", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.", ("gate_proj", "up_proj", "down_proj")),
}
"""Place of the experts, and the names of an expert's gate, up and down projections."""


def _experts(config: Mapping[str, Any], ours: str, theirs: str) -> Iterator[MappedParameter]:
    place, names = _EXPERTS[config["model_type"]]
    # Qwen's published files have the second word, newer ones of `transformers` the first.
    count = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    yield _same(ours + "router.weight", f"{theirs}{place}gate.weight")
    for e in range(count):
        expert = f"{theirs}{place}experts.{e}."
        yield from _gated_mlp(f"{ours}experts.local_experts.{e}.", expert, names)


def _gated_mlp(ours: str, theirs: str, names: tuple[str, str, str]) -> Iterator[MappedParameter]:
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    # Megatron's fc1 holds the rows of the gate, then the rows of the up projection.
    yield MappedParameter(
        ours + "linear_fc1.weight",
        (gate, up),
        lambda gate, up: torch.cat((gate, up)),
        lambda both: tuple(both.chunk(2)),
    )
    yield _same(ours + "linear_fc2.weight", down)


def _llama_heads(config: Mapping[str, Any]) -> Heads:
    query = config["num_attention_heads"]
    channels = config.get("head_dim") or config["hidden_size"] // query
    return Heads(query, config.get("num_key_value_heads") or query, channels)


def _gpt2(config: Mapping[str, Any]) -> Iterator[MappedParameter]:
    heads = Heads(config["n_head"], config["n_head"], config["n_embd"] // config["n_head"])
    # Embeddings, then every layer, then the last norm and the output layer.
    yield _same("embedding.word_embeddings.weight", "transformer.wte.weight")
    yield _same("embedding.position_embeddings.weight", "transformer.wpe.weight")
    for i in range(config["n_layer"]):
        ours, theirs = f"decoder.layers.{i}.", f"transformer.h.{i}."
        yield from _both(ours + "input_layernorm", theirs + "ln_1")
        for kind in ("weight", "bias"):
            # One matrix of queries, keys, values, stored as [in, out].
            yield MappedParameter(
                f"{ours}self_attention.linear_qkv.{kind}",
                (f"{theirs}attn.c_attn.{kind}",),
                lambda both: heads.join(*_turned(both).chunk(3)),
                lambda qkv: (_turned(torch.cat(heads.split(qkv))),),
            )
        # All other matrices of a layer are `Conv1D` too.
        for mine, name in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            for kind in ("weight", "bias"):
                yield MappedParameter(
                    f"{ours}{mine}.{kind}",
                    (f"{theirs}{name}.{kind}",),
                    _turned,
                    lambda tensor: (_turned(tensor),),
                )
        yield from _both(ours + "pre_mlp_layernorm", theirs + "ln_2")
    yield from _both("decoder.final_layernorm", "transformer.ln_f")
    # Transformers ties the output layer of this family unless the config denies it.
    if config.get("tie_word_embeddings", True) is False:
        yield _same("output_layer.weight", "lm_head.weight")


def _neox(config: Mapping[str, Any]) -> Iterator[MappedParameter]:
    _need_gelu("gpt_neox", config.get("hidden_act", "gelu"))
    yield _same("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight")
    for i in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{i}.", f"gpt_neox.layers.{i}."
        # Head after head, its query, key and value: Megatron's own order.
        for mine, name in (
            ("input_layernorm", "input_layernorm"),
            ("self_attention.linear_qkv", "attention.query_key_value"),
            ("self_attention.linear_proj", "attention.dense"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
            ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
        ):
            yield from _both(ours + mine, theirs + name)
    yield from _both("decoder.final_layernorm", "gpt_neox.final_layer_norm")
    if not config.get("tie_word_embeddings", False):
        yield _same("output_layer.weight", "embed_out.weight")


def _opt(config: Mapping[str, Any]) -> Iterator[MappedParameter]:
    count = config["num_attention_heads"]
    heads = Heads(count, count, config["hidden_size"] // count)
    yield _same("embedding.word_embeddings.weight", "model.decoder.embed_tokens.weight")
    # Two rows come before position 0 (`OPTLearnedPositionalEmbedding.offset`).
    yield MappedParameter(
        "embedding.position_embeddings.weight",
        ("model.decoder.embed_positions.weight",),
        lambda table: table[2:],
        lambda table: (torch.cat((table.new_zeros(2, table.shape[1]), table)),),
    )
    for i in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{i}.", f"model.decoder.layers.{i}."
        for kind in ("weight", "bias"):
            yield _qkv(ours, kind, theirs + "self_attn.", heads)
        for mine, name in (
            ("input_layernorm", "self_attn_layer_norm"),
            ("self_attention.linear_proj", "self_attn.out_proj"),
            ("pre_mlp_layernorm", "final_layer_norm"),
            ("mlp.linear_fc1", "fc1"),
            ("mlp.linear_fc2", "fc2"),
        ):
            yield from _both(ours + mine, theirs + name)
    yield from _both("decoder.final_layernorm", "model.decoder.final_layer_norm")
    if config.get("tie_word_embeddings", True) is False:
        yield _same("output_layer.weight", "lm_head.weight")


def _same(megatron: str, theirs: str) -> MappedParameter:
    return MappedParameter(megatron, (theirs,), lambda tensor: tensor, lambda tensor: (tensor,))


def _both(megatron: str, theirs: str) -> Iterator[MappedParameter]:
    for kind in ("weight", "bias"):
        yield _same(f"{megatron}.{kind}", f"{theirs}.{kind}")


def _qkv(ours: str, kind: str, attention: str, heads: Heads) -> MappedParameter:
    names = tuple(f"{attention}{letter}_proj.{kind}" for letter in "qkv")
    name = f"{ours}self_attention.linear_qkv.{kind}"
    return MappedParameter(name, names, heads.join, heads.split)


def _turned(tensor: Tensor) -> Tensor:
    """Transpose a weight of GPT-2's `Conv1D`, which is [in, out]; leave a bias as it is."""
    return tensor.t() if tensor.dim() == 2 else tensor


def _need_gelu(kind: str, activation: str) -> None:
    if not activation.startswith("gelu"):
        raise UnsupportedError(
            f"{kind} with the activation {activation!r}: Megatron has no flag for it, so these "
            "weights would compute something else there"
        )
