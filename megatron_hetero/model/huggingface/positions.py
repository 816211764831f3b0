"""Rotary positions: base, share of the channels, and scaling, as `transformers` 4 and 5 write it.

Version 4 has `rope_theta`, `partial_rotary_factor` (`rotary_pct`) and `rope_scaling` side by side;
version 5 keeps all of them in `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hetero.model.huggingface.config import RotaryKeys
from megatron_hetero.model.huggingface.writer import FlagWriter, Key

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Megatron's own numbers (`RotaryEmbedding._apply_scaling`); its flags give the factor alone."""
_LATENT_YARN = {
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
}
"""Numbers of `MLATransformerConfig` without a flag."""
_YARN_FLAGS = {
    "original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    "beta_fast": "--yarn-beta-fast",
    "beta_slow": "--yarn-beta-slow",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
}
_KNOWN = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", *_LLAMA3),
    "yarn": ("factor", "attention_factor", "truncate", *_YARN_FLAGS),
}
_SAME_BASE = 1e-5
"""Part by which a base may differ: StarCoder2's is 999999.4420358813."""
_THETA = 10000.0
"""Base of a file that says none, as in transformers."""
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a file: `key` is the one that holds the scaling, `scaling` its value."""

    theta: float
    theta_key: Key
    share: float
    share_key: Key
    kind: str
    key: str
    scaling: Mapping[str, Any]


def read_rotary(writer: FlagWriter, config: RotaryKeys, share: float = 1.0) -> Rotary:
    """Read rotary positions in either form.

    Args:
        writer: for the place of a refusal.
        config: the keys.
        share: of each head's channels, the family's where the file says none.
    Raises:
        UnsupportedError: a scaling, or a number of one, that Megatron has not.
    """
    # `rope_scaling` is version 4's key, `rope_parameters` version 5's with the base in it as well.
    parameters, scaling = config.rope_parameters or {}, config.rope_scaling or {}
    key = "rope_scaling" if scaling else "rope_parameters"
    kept = scaling or parameters
    # Some models have one set of rotary numbers for each kind of layer.
    nested = next((k for k, v in kept.items() if isinstance(v, dict)), None)
    if nested is not None:
        writer.refuse((key, nested), "is of some layers alone, which Megatron has no flag for")
    # Older files say `type`, newer ones `rope_type`; without either nothing is scaled.
    kind = str(kept.get("rope_type", kept.get("type", "default")))
    if kind not in _KNOWN:
        writer.refuse(
            (key,),
            f'of type "{kind[:40]}" is not supported; {", ".join(_KNOWN)} are. Remove it, or '
            "describe the model by Megatron flags",
        )
    # Each number is one that Megatron has a flag or a constant for, or it is refused.
    for name, value in kept.items():
        if name not in (*_ALWAYS, *_KNOWN[kind]) and value is not None:
            if kind == "default" and name == "original_max_position_embeddings":
                continue
            writer.refuse((key, name), f'is not known of a scaling of type "{kind}"')
        # `isinstance(True, int)` holds in Python, and a switch is no number.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in ("rope_type", "type", "truncate") and not (is_number or value is None):
            writer.refuse((key, name), f"is {repr(value)[:40]}; it has to be a number")
    # Numbers within `rope_parameters` win over those at the top of the file.
    own_theta, own_share = parameters.get("rope_theta"), parameters.get("partial_rotary_factor")
    return Rotary(
        own_theta or config.rope_theta or _THETA,
        ("rope_parameters", "rope_theta") if own_theta else "rope_theta",
        own_share or config.partial_rotary_factor or share,
        ("rope_parameters", "partial_rotary_factor") if own_share else "partial_rotary_factor",
        kind,
        key,
        kept,
    )


def write_rotary(writer: FlagWriter, rotary: Rotary, *, always_share: bool = False) -> None:
    """Write rotary positions of plain attention.

    Args:
        writer: for the flags.
        rotary: of the file.
        always_share: write the share of the channels even if it is all of them.
    """
    # Only yarn is a type of its own in Megatron; other scalings are flags on `rope`.
    kind = "yarn" if rotary.kind == "yarn" else "rope"
    writer.add((rotary.key,), "--position-embedding-type", kind)
    # Megatron rotates all channels by default.
    if always_share or rotary.share != 1.0:
        writer.add(rotary.share_key, "--rotary-percent", repr(float(rotary.share)))
    _write_base(writer, rotary)
    key, scaling = rotary.key, rotary.scaling
    if rotary.kind == "llama3":
        for name, number in _LLAMA3.items():
            if scaling.get(name, number) != number:
                writer.refuse(
                    (key, name), f"is {scaling[name]}; Megatron's rope scaling has {number}"
                )
        writer.add(
            (key, "factor"),
            "--use-rope-scaling",
            "--rope-scaling-factor",
            str(scaling.get("factor", 8.0)),
        )
    elif rotary.kind == "linear":
        factor = scaling.get("factor", 1)
        if factor != int(factor) or factor < 1:
            writer.refuse((key, "factor"), f"is {factor}; Megatron's linear scaling is by integers")
        writer.add((key, "factor"), "--rotary-seq-len-interpolation-factor", int(factor))
    elif rotary.kind == "yarn":
        _write_yarn(writer, rotary)


def write_latent_rotary(writer: FlagWriter, rotary: Rotary) -> None:
    """Write rotary positions of latent attention, whose flags are fewer."""
    writer.require((rotary.key,), rotary.kind, "default", "yarn")
    writer.add((rotary.key,), "--position-embedding-type", "rope")
    _write_base(writer, rotary)
    if rotary.kind == "default":
        writer.add((rotary.key,), "--rope-type", "rope")
        return
    # Yarn of latent attention is chosen by another flag than that of plain attention.
    writer.add((rotary.key,), "--rope-type", "yarn")
    for name, flag in (
        ("factor", "--rotary-scaling-factor"),
        ("mscale", "--mscale"),
        ("mscale_all_dim", "--mscale-all-dim"),
    ):
        if rotary.scaling.get(name) is not None:
            writer.add((rotary.key, name), flag, rotary.scaling[name])
    # What Megatron has as a constant is a difference if the file has another number.
    for name, (words, number) in _LATENT_YARN.items():
        value = rotary.scaling.get(name)
        if value is not None and value != number:
            writer.differ(f"{words} of its yarn is {number}, not {value} (no flag)")


def _write_base(writer: FlagWriter, rotary: Rotary) -> None:
    base = round(rotary.theta)
    if not math.isclose(base, rotary.theta, rel_tol=_SAME_BASE):
        writer.refuse(
            rotary.theta_key,
            f"{rotary.theta} is not a whole number, which Megatron's --rotary-base has to be",
        )
    if base != rotary.theta:
        writer.differ(f"the base of rotary positions is {base}, not {rotary.theta}")
    writer.add(rotary.theta_key, "--rotary-base", base)


def _write_yarn(writer: FlagWriter, rotary: Rotary) -> None:
    """Write yarn of plain attention; a factor of attention must be the default of
    `transformers`."""
    key, scaling = rotary.key, rotary.scaling
    factor = scaling.get("factor")
    if factor is None:
        writer.refuse((key,), "of type yarn has no factor; add it")
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    attention = scaling.get("attention_factor")
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-6):
        writer.refuse((key, "attention_factor"), f"is {attention}; Megatron's is {usual:.6g}")
    writer.add((key, "factor"), "--rotary-scaling-factor", factor)
    for name, flag in _YARN_FLAGS.items():
        if scaling.get(name) is not None:
            writer.add((key, name), flag, scaling[name])
    # Megatron rounds the bounds of the correction by default, as `transformers` does.
    if scaling.get("truncate") is False:
        writer.add((key, "truncate"), "--no-yarn-correction-range-round-to-int")
