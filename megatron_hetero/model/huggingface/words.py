"""Flags that several families of models share, and the refusal of values without a flag."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.files import Document


def require(document: Document, key: str, value: object, *allowed: object) -> None:
    """Check a value of which Megatron has only these.

    Args:
        document: the file, for the message.
        key: of the value.
        value: what the file says.
        allowed: values that Megatron has.

    Raises:
        UnsupportedError: the value is none of them.
    """
    if value not in allowed:
        raise UnsupportedError(
            f"{document.locate([key])}: {key} is {value!r}; Megatron has no flag for it, and only "
            f"{' and '.join(map(repr, allowed))} {'is' if len(allowed) == 1 else 'are'} supported"
        )


def shape_flags(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_heads: int, num_positions: int
) -> list[str]:
    """Write the sizes that every model has."""
    sizes = {
        "--num-layers": num_layers,
        "--hidden-size": hidden_size,
        "--ffn-hidden-size": ffn_hidden_size,
        "--num-attention-heads": num_heads,
        "--max-position-embeddings": num_positions,
    }
    return [word for flag, size in sizes.items() for word in (flag, str(size))]


def dropout_flags(attention: float, hidden: float) -> list[str]:
    """Write both dropouts always: without the flags Megatron drops 0.1."""
    return ["--attention-dropout", repr(attention), "--hidden-dropout", repr(hidden)]


def rms_norm_flags(epsilon: float) -> list[str]:
    """Write the norm of Llama and its like."""
    return ["--normalization", "RMSNorm", "--norm-epsilon", repr(epsilon)]


def rotary_flags(document: Document, theta: object) -> list[str]:
    """Write rotary position embeddings of base `theta`.

    Raises:
        UnsupportedError: it is not a whole number.
    """
    if not isinstance(theta, int | float) or theta != int(theta):
        raise UnsupportedError(
            f"{document.locate(['rope_theta'])}: rope_theta {theta} is not a whole number, which "
            "Megatron's --rotary-base has to be"
        )
    return ["--position-embedding-type", "rope", "--rotary-base", str(int(theta))]


def layer_flags(has_experts: Sequence[int]) -> list[str]:
    """Write which layers have experts (1) and which are dense (0), as Megatron reads it:
    "[0]*3+[1]*58"; nothing where all have."""
    if 0 not in has_experts:
        return []
    runs = [(kind, len(list(run))) for kind, run in groupby(has_experts)]
    return ["--moe-layer-freq", "+".join(f"[{kind}]*{count}" for kind, count in runs)]
