"""Flags of experts and latent attention, which replace parts of Megatron's plain layer."""

from __future__ import annotations

import re
from typing import Any

from megatron_hetero.model.flag_reader import FlagReader

_TOKEN = re.compile(r"\[[01](?:,[01])*\]|[0-9]+|[()+*]")
"""Token of a list in `--moe-layer-freq`: zeros and ones, a number of repetitions, or a sign."""
_MOST_LAYERS = 1 << 16
_MOST_BRACKETS = 40


def layers_with_experts(flags: FlagReader, num_layers: int, num_experts: int) -> dict[str, Any]:
    """Read which layers have experts, and the shared expert: fields of `ModelSpec`.

    Args:
        flags: the job's flags.
        num_layers: of the model.
        num_experts: of each layer that has them; 0 for a dense model, which none of this concerns.
    """
    if not num_experts:
        return {}
    pattern = _moe_layer_freq(flags, num_layers)
    if 1 not in pattern:
        flags.fail(
            ["--moe-layer-freq"],
            f"--moe-layer-freq leaves none of {num_layers} layers with experts; leave "
            "--num-experts out to train a dense model",
        )
    return {
        # An empty pattern says that all layers have experts, which is the usual case.
        "moe_layer_freq": pattern if 0 in pattern else (),
        "moe_shared_expert_intermediate_size": flags.size(
            "--moe-shared-expert-intermediate-size", 0
        ),
        "moe_shared_expert_gate": flags.switch("--moe-shared-expert-gate"),
    }


def _moe_layer_freq(flags: FlagReader, num_layers: int) -> tuple[int, ...]:
    """Read 1 for each layer with experts and 0 for each other: every so many layers, or as a list
    that Megatron would evaluate, such as "([0]*3+[1]*58)"."""
    flag = "--moe-layer-freq"
    words = flags.words(flag)
    # The quotes of a shell may be left where the flag comes from a file.
    text = "".join(words or ("1",)).replace(" ", "").strip("\"'")
    # N: layers 0, N, 2 N and so on have experts.
    if text.isascii() and text.isdecimal() and int(text):
        return tuple(int(i % int(text) == 0) for i in range(num_layers))
    pattern = listed_layers(text)
    if pattern is None:
        flags.fail(
            [flag],
            f'{flag} is "{" ".join(words or ())}"; it must be a number (2 is every second '
            'layer) or a list such as "([0]*3+[1]*58)"',
        )
    if len(pattern) != num_layers:
        flags.fail(
            [flag],
            f"{flag} says which of {len(pattern)} layers have experts; --num-layers is "
            f"{num_layers}",
        )
    return tuple(pattern)


def listed_layers(text: str) -> list[int] | None:
    """Read a list of zeros and ones as Python would evaluate it; None where the text is none."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text or text.count("(") > _MOST_BRACKETS:
        return None
    tokens.reverse()
    try:
        pattern = _sum(tokens)
    except ValueError:
        return None
    return None if tokens else pattern


def _sum(tokens: list[str]) -> list[int]:
    """Take lists with `+` between from the tokens, of which the last comes first."""
    pattern = _product(tokens)
    while tokens and tokens[-1] == "+":
        tokens.pop()
        pattern = _bounded(pattern, 1) + _product(tokens)
    return pattern


def _product(tokens: list[str]) -> list[int]:
    first = tokens.pop() if tokens else ""
    if first == "(":
        pattern = _sum(tokens)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a bracket is not closed")
    elif first.startswith("["):
        pattern = [int(x) for x in first[1:-1].split(",")]
    else:
        raise ValueError("a list is missing")
    # Repetitions follow their list, in brackets or not.
    while tokens and tokens[-1] == "*":
        tokens.pop()
        pattern = _bounded(pattern, int(tokens.pop() if tokens else ""))
    return pattern


def _bounded(pattern: list[int], count: int) -> list[int]:
    # A list beyond all models would fill the memory.
    if len(pattern) * count > _MOST_LAYERS:
        raise ValueError("the list is too long")
    return pattern * count


def latent_attention(flags: FlagReader) -> dict[str, Any]:
    """Read the sizes of multi-latent attention, with Megatron's defaults: fields of `ModelSpec`."""
    if not flags.switch("--multi-latent-attention"):
        return {}
    # Megatron's latent attention has a latent in place of groups of keys and values.
    if flags.switch("--group-query-attention"):
        flags.fail(
            ["--group-query-attention"],
            "--group-query-attention and --multi-latent-attention are both given; Megatron takes "
            "one of them",
        )
    return {
        "q_lora_rank": flags.size("--q-lora-rank", 0),
        "kv_lora_rank": flags.size("--kv-lora-rank", 32),
        "qk_head_dim": flags.size("--qk-head-dim", 128),
        "qk_pos_emb_head_dim": flags.size("--qk-pos-emb-head-dim", 64),
        "v_head_dim": flags.size("--v-head-dim", 128),
        "divides_latents": flags.known_text("--transformer-impl") == "local",
    }
