"""Families whose weights can be converted, by the `model_type` of config.json; without torch."""

from __future__ import annotations

LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose tensors have the names of Llama's, with experts or without."""

CONDITIONS = {
    **dict.fromkeys(LLAMA_LIKE, ""),
    "gpt2": "",
    "gpt_neox": "without parallel residual",
    "opt": "with gelu",
}
"""Each `model_type`, and the condition on its configuration."""


def families_in_words() -> str:
    """Return all families in a line, each with its condition."""
    return ", ".join(f"{kind} ({only})" if only else kind for kind, only in CONDITIONS.items())
