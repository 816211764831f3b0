"""Part of every global parameter that this rank holds, read off Megatron's own attributes.

Megatron marks each parameter with the dimension along which it is divided and its stride (2 for a
gated `linear_fc1`, whose shard is a piece of the gate over a piece of the up projection). From
these, the tensor-parallel place (`runtime.parallel.tensor_place`) and the layer numbers follow the
global name, the global shape and the intervals of the divided dimension that this rank holds, in
the order in which they lie in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config, unwrap_model

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.parallel.tensor_place import tensor_place

TIED_EMBEDDING = "embedding.word_embeddings.weight"
_FIRST_OF_AN_MLP = ("linear_fc1.weight", "linear_fc1.bias")
_NUMBERED = re.compile(r"(?:^|\.)\d+$")
"""Place of a layer in the block; a layer that predicts further tokens has none of its own."""
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
"""Parameter of one expert in Transformer Engine's module of all (`--moe-grouped-gemm`)."""
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
"""Number of an expert among the rank's experts."""


@dataclass(frozen=True)
class ParameterShard:
    """Shard of a global parameter on a rank.

    `intervals` are (start, stop) along `dim` of the global tensor, in the order in which they lie
    in the local one; a replicated parameter has all of dimension 0. `is_partial` marks a local
    gradient that is a part of the sum over the tensor-parallel group (layer norms under sequence
    parallelism), as opposed to a copy of the whole.
    """

    name: str
    global_shape: tuple[int, ...]
    dim: int
    intervals: tuple[tuple[int, int], ...]
    is_sharded: bool
    is_partial: bool

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ParameterShard:
        """Build a shard from the JSON of `dataclasses.asdict`, which has no tuples."""
        return cls(
            entry["name"],
            tuple(entry["global_shape"]),
            entry["dim"],
            tuple((start, stop) for start, stop in entry["intervals"]),
            entry["is_sharded"],
            entry["is_partial"],
        )

    def holds(self, start: int, stop: int) -> bool:
        """Tell if `start:stop` of the divided dimension lies on this rank in one piece."""
        return any(a <= start and stop <= b for a, b in self.intervals)

    def local_offset(self, start: int) -> int:
        """Return the local index of global index `start` of the divided dimension.

        Raises:
            IndexError: the index is not on this rank.
        """
        offset = 0
        for a, b in self.intervals:
            if a <= start < b:
                return offset + start - a
            offset += b - a
        raise IndexError(f"{self.name}: index {start} is not on this rank")


def shard_of(name: str, parameter: torch.nn.Parameter, config: Any) -> ParameterShard:
    """Describe `parameter`, held at the tensor-parallel place stored on `config`."""
    place = tensor_place(config)
    shape = list(parameter.shape)
    # Transformer Engine's layers do not record the stride of a gated projection.
    is_gated = config.gated_linear_unit and name.endswith(_FIRST_OF_AN_MLP)
    edges, index = place.part_of(name)
    is_marked = getattr(parameter, "tensor_model_parallel", False)
    is_divided = is_marked and len(edges) > 2
    # No other rank of the tensor-parallel group has the same part of an expert that is dealt out,
    # or it has the part for other tokens.
    dealt = place.dealt if is_expert(name) else None
    is_own = dealt is not None and (dealt.is_apart or (is_marked and place.width > 1))
    is_apart = dealt is not None and dealt.is_apart
    if not is_divided:
        dim = max(getattr(parameter, "partition_dim", 0), 0)
        # Two tensors in one, also where they are not divided: a checkpoint keeps them apart.
        blocks = (0, shape[dim] // 2, shape[dim]) if is_gated else (0, shape[dim])
        partial = is_apart or (not is_own and _is_partial(name, parameter, config))
        intervals = tuple(pairwise(blocks))
        return ParameterShard(name, tuple(shape), dim, intervals, is_own, partial)
    dim = parameter.partition_dim
    num_blocks = 2 if is_gated else parameter.partition_stride
    # This rank's part of the divided dimension, in units of the edges.
    first, last = edges[index], edges[index + 1]
    # Rows of one unit, and of one whole block.
    rows = shape[dim] // num_blocks // (last - first)
    block = edges[-1] * rows
    shape[dim] = num_blocks * block
    # Own rows of every block: of a gated projection, those of the gate come first.
    intervals = tuple(
        (b * block + first * rows, b * block + last * rows) for b in range(num_blocks)
    )
    return ParameterShard(name, tuple(shape), dim, intervals, True, is_apart)


def is_expert(name: str) -> bool:
    """Tell if a global parameter is one of an expert; a shared expert is none."""
    return bool(_EXPERT.search(name))


def _is_partial(name: str, parameter: torch.nn.Parameter, config: Any) -> bool:
    """Tell if a gradient is a partial sum, as `_allreduce_non_tensor_model_parallel_grads`."""
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise UnsupportedError(
            f"{name}: gradients averaged over the tensor-parallel group (mixture-of-experts "
            "routers) are not supported on asymmetric plans yet."
        )
    if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
        return True
    if config.multi_latent_attention:
        # Norms of latents, which every rank has whole unless it has a part of the sequence.
        return False
    return bool(config.qk_layernorm) and ("q_layernorm" in name or "k_layernorm" in name)


def _moved(first_expert: int, found: re.Match[str]) -> str:
    """Number an expert of this rank among all of its layer."""
    return f".local_experts.{int(found[1]) + first_expert}."


def global_parameters(
    model: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (global name, parameter) of every trainable parameter, in the model's own order.

    Layer numbers are the whole model's, a tied output layer has the name of the embedding, and an
    expert the same name in a module of its own and in one of all experts.
    """
    for chunk in unwrap_model(list(model)):
        first_expert = tensor_place(get_model_config(chunk)).first_expert
        # Megatron numbers layers within a chunk: prefix -> prefix with the model's number.
        layer_prefixes = {
            prefix: f"{prefix.rpartition('.')[0]}.{module.layer_number - 1}"
            for prefix, module in chunk.named_modules()
            if isinstance(module, TransformerLayer) and _NUMBERED.search(prefix)
        }
        for name, parameter in chunk.named_parameters():
            # A frozen parameter has no gradient to exchange.
            if not parameter.requires_grad:
                continue
            for prefix, global_prefix in layer_prefixes.items():
                if name.startswith(prefix + "."):
                    name = global_prefix + name[len(prefix) :]
                    break
            name = _GROUPED_EXPERT.sub(r".experts.local_experts.\3.\1.\2", name)
            if first_expert:
                name = _EXPERT.sub(partial(_moved, first_expert), name)
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = TIED_EMBEDDING
            yield name, parameter
