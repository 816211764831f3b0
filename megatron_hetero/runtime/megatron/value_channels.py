"""`DotProductAttention.__init__`: value heads of another width than the queries'.

Latent attention (`--multi-latent-attention`) tells its core attention how wide keys and values are.
Transformer Engine's takes the two numbers; Megatron's local one does not know their names, although
its forward pass would serve but for the width of the result.  The constructor is replaced by one
that calls Megatron's own and then sets that width, so that latent attention trains on a CPU.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.transformer.dot_product_attention",
    name="DotProductAttention.__init__",
    reason="latent attention says how wide its value heads are",
    known={"1081aca9a2f35290": TESTED},
    is_stock=True,
)


def apply_if_needed(args: Any) -> None:
    """Replace the symbol in this process where Megatron's `args` build local latent attention."""
    if not (args.multi_latent_attention and args.transformer_impl == "local"):
        return
    original = REPLACEMENT.original()

    def __init__(  # noqa: N807
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        original(self, *args, **kwargs)
        # Megatron's constructor took values to be as wide as keys.
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    REPLACEMENT.apply(__init__)
