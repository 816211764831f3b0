"""Multi-token prediction (`--mtp-num-layers`) on a plan: on the last stage of every replica.

The layers that predict further tokens follow the last stage's own, and embed the tokens once more.
So the last stage has a copy of the embeddings: weights with holders on two stages, whose gradients
are summed as those of any others. In Megatron an output layer that is tied keeps a weight beside
that copy, which nothing uses; it is dropped.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules

from megatron_hetero.runtime.megatron import mtp_losses
from megatron_hetero.runtime.model.spec_parts import with_parts
from megatron_hetero.runtime.parallel.groups import RankGroups


def predicting_spec(
    spec: MultiTokenPredictionBlockSubmodules, parts: dict[Any, Any]
) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec with other parts (`runtime.model.spec_parts`)."""
    layers = [with_parts(layer, parts) for layer in spec.layer_specs or ()]
    return MultiTokenPredictionBlockSubmodules(layer_specs=layers)


def one_embedding_hook(model: list[Any]) -> list[Any]:
    """Drop the unused weight of a tied output layer, and let the norm count a copy of the
    embeddings once: a `pre_wrap_hook`."""
    for chunk in model:
        # A copy is where tokens are embedded for the prediction but not for the first layer.
        if chunk.pre_process or not chunk.mtp_process:
            continue
        if chunk.share_embeddings_and_output_weights:
            chunk.output_layer.weight = None
        for parameter in chunk.embedding.parameters():
            parameter.shared = True
    return model


def follow_losses(groups: RankGroups, size: int) -> None:
    """Log the losses of further tokens of the whole job (`size` as in `mtp_losses.apply`)."""
    if groups.last_stages is not None:
        mtp_losses.apply(groups.last_stages, groups.tensor.size(), size)
