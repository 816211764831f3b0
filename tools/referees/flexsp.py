"""The cost of sequences that the authors of FlexSP published, for comparisons with their system.

Wang et al., "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism"
(arXiv 2412.01523), section 4.1, with the constants of their solver for A100-40G GPUs, 8 machines of
8: time = (a1 s^2 + a2 s) / d + b1 + a3 s / (d v_d), memory = s / d tokens and 16 bytes a parameter
over all GPUs.  Nothing here was measured by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_hetero.errors import UsageError
from megatron_hetero.sequences.price.group_price import Floats
from megatron_hetero.sequences.tree import GroupTree, make_tree
from tools.nests import halved

LIMIT_BYTES = 28e9
"""What the authors let one GPU of 40 GB hold."""
ALL_TO_ALL_BYTES_PER_S: Mapping[int, float] = {
    2: 119.54e9,
    4: 104.07e9,
    8: 96.5e9,
    16: 10.33e9,
    32: 5.94e9,
    64: 4.87e9,
}


@dataclass(frozen=True)
class PublishedModel:
    """Constants of one model: seconds for each token squared, for each token, and for each launch;
    bytes of activations for each token."""

    name: str
    attention_s: float
    linear_s: float
    launch_s: float
    token_bytes: float
    num_params: Mapping[int, float]
    """Parameters by the length that the learned positions go up to."""
    num_layers: int
    hidden_size: int


_K = 1024
MODELS: Mapping[str, PublishedModel] = {
    model.name: model
    for model in (
        PublishedModel(
            "GPT-7B", 5.128e-9, 0.1839576e-3, 0.6293563, 4.480441895e6,
            {4 * _K: 6.51e9, 192 * _K: 7.1174e9, 384 * _K: 7.8499e9}, 32, 4096,
        ),
        PublishedModel(
            "GPT-13B", 9.2852e-9, 0.3060189e-3, 1.1325632, 4.220439453e6,
            {4 * _K: 12.357e9, 192 * _K: 13.116e9, 384 * _K: 14.032e9}, 40, 5120,
        ),
        PublishedModel(
            "GPT-30B", 15.4262e-9, 0.8035742e-3, 2.7893644, 3.417381836e6,
            {4 * _K: 30.538e9, 192 * _K: 31.525e9, 384 * _K: 32.715e9}, 60, 6656,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class PublishedPrice:
    """The published cost on a group of `size` GPUs.  Memory is counted in tokens of each GPU."""

    model: PublishedModel
    size: int
    room_tokens: float

    @property
    def name(self) -> str:
        """Return the exchange: none on one GPU, else Ulysses' all-to-all."""
        return "alone" if self.size == 1 else "all-to-all"

    @property
    def fixed_s(self) -> float:
        """Return b1."""
        return self.model.launch_s

    @property
    def room(self) -> tuple[float]:
        """Return the tokens that one GPU holds."""
        return (self.room_tokens,)

    def seconds(self, lengths: Floats) -> Floats:
        """Return the seconds that each sequence adds, shape [sequence]."""
        model = self.model
        computing = (model.attention_s * lengths + model.linear_s) * lengths / self.size
        if self.size == 1:
            return np.asarray(computing)
        # Two collectives of four tensors in each layer, forward and backward, of two bytes.
        moved = 4 * 2 * model.num_layers * model.hidden_size * lengths * 2
        return np.asarray(computing + moved / self.size / ALL_TO_ALL_BYTES_PER_S[self.size])

    def memory(self, lengths: Floats) -> Floats:
        """Return the tokens on each GPU, shape [1, sequence]."""
        return np.asarray(lengths / self.size)[None, :]


def published_tree(model_name: str, num_gpus: int, longest: int) -> GroupTree:
    """Return the groups of 1, 2, 4 .. `num_gpus` GPUs under the published constants.

    Args:
        model_name: key of `MODELS`.
        num_gpus: a power of two, 64 at most.
        longest: length in tokens for which the learned positions are made: a key of `num_params`.
    Raises:
        UsageError: nothing is published for these.
    """
    if model_name not in MODELS:
        raise UsageError(f"{model_name}: constants are published for {', '.join(MODELS)}")
    model = MODELS[model_name]
    if num_gpus < 1 or num_gpus & (num_gpus - 1) or num_gpus > max(ALL_TO_ALL_BYTES_PER_S):
        raise UsageError(
            f"{num_gpus} GPUs: the published speeds are for powers of two up to "
            f"{max(ALL_TO_ALL_BYTES_PER_S)}"
        )
    if longest not in model.num_params:
        raise UsageError(f"{longest} tokens: published are {', '.join(map(str, model.num_params))}")
    state_bytes = 16 * model.num_params[longest] / num_gpus
    room_tokens = (LIMIT_BYTES - state_bytes) / model.token_bytes
    if room_tokens < 1:
        raise UsageError(f"{model_name} does not fit on {num_gpus} GPUs of {LIMIT_BYTES:.0f} bytes")
    return make_tree(
        halved(range(num_gpus)),
        lambda ranks: (len(ranks), (PublishedPrice(model, len(ranks), room_tokens),)),
    )
