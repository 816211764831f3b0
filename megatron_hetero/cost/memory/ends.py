"""Bytes that the ends of a model keep from forward to backward: embedding, head, further tokens."""

from __future__ import annotations

from megatron_hetero.cost.memory.activations import layer_activation_bytes, norm_statistics
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


def embedding_activation_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> int:
    """Count the bytes that the embedding keeps: token and position numbers, the marks of tokens
    whose rows another member holds, and a mask byte after its dropout.

    Args:
        share: the device's part of its tensor-parallel group.
    """
    # Token and position numbers are 8 bytes, the mark of a foreign row one.
    tokens = share.num_tokens(model, training)
    numbers = 2 if model.position_embedding == "learned_absolute" else 1
    kept = tokens * (8 * numbers + (1 if share.width > 1 else 0))
    if training.hidden_dropout:
        kept += share.own_tokens(model, training) * model.hidden_size
    return kept


def head_activation_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, vocab_rows: int
) -> int:
    """Count the bytes that the last norm, the output layer and the vocabulary-parallel cross
    entropy keep.

    The cross entropy keeps its softmax in fp32, in the place of the logits where those are fp32
    already (`megatron.core.tensor_parallel.cross_entropy`); Transformer Engine's keeps a copy of
    the logits as they are.

    Args:
        share: the device's part of its tensor-parallel group.
        vocab_rows: rows of the padded vocabulary.
    """
    element = training.element_bytes
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    norm = model.hidden_size * (training.residual_bytes + element) + norm_statistics(model)
    kept = own_tokens * norm
    logit = element if training.fused_loss == "te" else 4
    # For each token its label, where it lies, and its weight in the loss.
    return kept + tokens * (vocab_rows // share.width) * logit + tokens * (8 + 1 + 4)


def further_activation_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, vocab_rows: int, flash: bool
) -> int:
    """Count the bytes kept by the layers for further tokens: each has an embedding, a joining and a
    loss of its own.

    Args:
        share: the device's part of its tensor-parallel group.
        vocab_rows: rows of the padded vocabulary.
        flash: attention is fused.
    """
    if not model.mtp_num_layers:
        return 0
    joined = 2 * share.num_tokens(model, training) * model.hidden_size * training.element_bytes
    # Inputs of the two norms before the joining; that of the last norm is the head's.
    normed = (
        2
        * share.own_tokens(model, training)
        * (model.hidden_size * training.element_bytes + norm_statistics(model))
    )
    # A whole layer, an embedding and a loss of their own for each further token.
    kept = layer_activation_bytes(model, training, share, flash, training.recompute)
    kept += embedding_activation_bytes(model, training, share)
    kept += head_activation_bytes(model, training, share, vocab_rows)
    return model.mtp_num_layers * (kept + joined + normed)
