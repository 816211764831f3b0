"""`megatron.training.training.clip_qk`: the largest attention logits over unlike replicas.

After a step Megatron takes the largest logit of every head over data-parallel groups, and with
`--qk-clip` scales the head's queries and keys by it.  Replicas of a plan cut heads and layers
unlike, so here each rank puts its heads into a table of all layers and heads, and the job takes the
largest.  Every holder of a head then clips it alike, by Megatron's own rule; the number for the log
is the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement
from megatron_hetero.runtime.parallel.tensor_place import tensor_place

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="clip_qk",
    reason="replicas cut heads and layers unlike",
    known={"283de85830761096": TESTED},
)


def apply(num_heads: int) -> None:
    """Take the largest logits over the job, whose layers have `num_heads` heads, from now on."""

    @torch.no_grad()
    def clip_qk(model: Sequence[Any], log_max_only: bool = False) -> float:
        """Clip queries and keys, unless `log_max_only`.  Collective.

        Returns:
            The largest logit of the whole model, or 0 if that is larger, as Megatron has it.
        """
        config = get_model_config(model[0])
        place = tensor_place(config)
        # Edges of all ranks' heads; query groups are never cut.
        edges = [unit * num_heads // place.query_groups[-1] for unit in place.query_groups]
        own = slice(*edges[place.index : place.index + 2])
        device = next(model[0].parameters()).device
        # [layer, head], minus infinity where another rank has the head.
        table = torch.full((config.num_layers, num_heads), float("-inf"), device=device)
        layers = dict(_layers(model))
        for number, attention in layers.items():
            table[number, own] = attention.core_attention.current_max_attn_logits
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        for number, attention in layers.items():
            core = attention.core_attention
            # Megatron's own function clips by these; a step that only logs begins anew.
            core.current_max_attn_logits = None if log_max_only else table[number, own]
            if not log_max_only:
                with _own_projections(attention, place.width):
                    attention.clip_qk()
        return max(0.0, float(table.max()))

    REPLACEMENT.apply(clip_qk)


@contextmanager
def _own_projections(attention: Any, width: int) -> Iterator[None]:
    """Let the sizes of a layer's projections be this rank's.

    Megatron 0.19 divides the group's by the heads of one rank, and fails beyond a width of 1.
    """
    saved = attention.query_projection_size, attention.kv_projection_size
    attention.query_projection_size, attention.kv_projection_size = (n // width for n in saved)
    try:
        yield
    finally:
        attention.query_projection_size, attention.kv_projection_size = saved


def _layers(model: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (number of the layer in the whole model, attention) for layers with logits."""
    for chunk in unwrap_model(list(model)):
        for layer in chunk.decoder.layers:
            core = getattr(layer.self_attention, "core_attention", None)
            if getattr(core, "current_max_attn_logits", None) is not None:
                yield layer.layer_number - 1, layer.self_attention
