"""Engines, as far as plans depend on them.

vLLM's figures are its defaults of 0.32 [code: `vllm/config/cache.py`, `vllm/engine/arg_utils.py`];
SGLang's those of its server arguments.  Both are flags that `launch` writes out, so that a run has
what was planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hetero.serving.prices.measured import StepProfile

EngineName = Literal["vllm", "sglang", "any"]


@dataclass(frozen=True)
class Engine:
    """Rules of an engine.

    Attributes:
        memory_part: of a GPU's memory that the engine fills.
        block_tokens: tokens whose keys and values are allotted together.
        max_batched_tokens: of one step.
        max_sequences: that run at once.
        step_s: of the host for each step, beside the GPU's time (scheduling, sampling).
        keeps_windows: whether it keeps no more tokens than windows of attention need; in the models
            that are read, SGLang 0.5.23 has no windows but in GPT-OSS.
        runs_unlike_widths: whether stages of one pipeline may have unlike tensor-parallel widths.
        profile: steps that were measured with the engine; None: prices are those of tables.
    """

    name: EngineName
    memory_part: float = 0.9
    block_tokens: int = 16
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    step_s: float = 2e-4
    keeps_windows: bool = True
    runs_unlike_widths: bool = False
    profile: StepProfile | None = None


ENGINES: dict[EngineName, Engine] = {
    "vllm": Engine("vllm"),
    "sglang": Engine("sglang", memory_part=0.88, block_tokens=1, keeps_windows=False),
    # No engine runs such pipelines yet: for the price of that restriction.
    "any": Engine("any", runs_unlike_widths=True),
}

LATENT_BLOCK_TOKENS = 64
"""vLLM's block for latent attention: FlashMLA and FlashInfer have kernels for it and not for 16,
and a size that is named rules out the kernels that lack it."""
