"""Initial weights that do not depend on the layout.

Megatron draws each rank's shard from that rank's random state, so another layout starts elsewhere.
Here every parameter is drawn whole, on the CPU, from a state seeded by its global name alone, and
each rank keeps its shard.  The distributions are Megatron's (`init_method`,
`output_layer_init_method`, `embedding_init_method` of the configuration); vectors (biases, norms)
are constants already and stay, but for learnable offsets of the softmax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_hetero.runtime.model.custom_spec import OFFSET, mark_offsets
from megatron_hetero.runtime.parallel.shards import TIED_EMBEDDING, global_parameters, shard_of

_OUTPUT_LAYERS = ("self_attention.linear_proj.weight", ".linear_fc2.weight")


def initialise(model: Sequence[torch.nn.Module], seed: int) -> None:
    """Draw the weights of `model`.

    At any moment one whole parameter is in host memory, in fp32.
    """
    config = get_model_config(model[0])
    mark_offsets(model)
    for name, parameter in global_parameters(model):
        if parameter.dim() < 2 and not name.endswith(OFFSET):
            continue
        shard = shard_of(name, parameter, config)
        whole = torch.empty(shard.global_shape, dtype=torch.float32, device="cpu")
        # The rank's own random state stays as it is.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed_of(name, seed))
            _distribution(name, config)(whole)
        # The rank's own pieces, in the order in which they lie in memory.
        parts = [whole.narrow(shard.dim, a, b - a) for a, b in shard.intervals]
        parameter.data.copy_(torch.cat(parts, dim=shard.dim))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _distribution(name: str, config: Any) -> Callable[[torch.Tensor], Any]:
    # Megatron draws these smaller, the deeper the model is.
    if name.endswith(_OUTPUT_LAYERS):
        return config.output_layer_init_method
    if name == TIED_EMBEDDING or name.startswith("embedding."):
        return config.embedding_init_method
    # Only muP draws an output layer of its own as it draws the embedding (Megatron's GPTModel).
    if config.use_mup and name.startswith("output_layer."):
        return config.embedding_init_method
    return config.init_method
