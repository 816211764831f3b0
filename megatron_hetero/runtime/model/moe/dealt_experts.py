"""Experts dealt out to ranks: of a tensor-parallel group, or of stages of several replicas.

Megatron's layer gives every rank of an expert-parallel group equally many experts.  Where the
table of a plan is equal, the layer is Megatron's own.  With unlike numbers the dispatcher is told
of as many experts on each rank as the rank with most of them has; those beyond a rank's own exist
in no router, so no token goes there.  The router, the choices and the experts stay those of the
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.parallel.tensor_place import DealtExperts, tensor_place


def deal_experts(config: Any, dealt: DealtExperts) -> None:
    """Tell Megatron's configuration of a model how experts are dealt out.

    Its own checks allow equal numbers alone, so they are not asked.
    """
    config.expert_model_parallel_size = len(dealt.edges) - 1
    config.expert_tensor_parallel_size = dealt.width


def experts_hook(model: list[Any]) -> list[Any]:
    """Let experts be reduced as all other parameters: a `pre_wrap_hook`.

    Megatron has data-parallel groups of their own for them; here the gradient sync knows who holds
    what.
    """
    for chunk in model:
        for parameter in chunk.parameters():
            if getattr(parameter, "allreduce", True) is False:
                parameter.allreduce = True
    return model


class DealtMoELayer(MoELayer):
    """Megatron's layer with a table of experts by rank (`TensorPlace.dealt`).

    Raises:
        UnsupportedError: the experts are in one module of Transformer Engine.
    """

    def __init__(self, config: Any, submodules: Any = None, *args: Any, **kwargs: Any) -> None:
        dealt = tensor_place(config).dealt
        if dealt is None or _is_equal(dealt.edges):
            super().__init__(config, submodules, *args, **kwargs)
            self._slots: torch.Tensor | None = None
            return
        edges, index = dealt.edges, dealt.index
        # Megatron is to build as many experts on each rank as the fullest rank has.
        most = max(b - a for a, b in pairwise(edges))
        padded = copy(config)
        padded.num_moe_experts = most * (len(edges) - 1)
        super().__init__(padded, submodules, *args, **kwargs)
        if not isinstance(self.experts, SequentialMLP):
            raise UnsupportedError(
                "unlike numbers of experts on the ranks of a stage (ep with shares): leave "
                "--moe-grouped-gemm out; Transformer Engine's module of all experts wants as many "
                "as its dispatcher knows"
            )
        # Experts beyond this rank's own go again.
        own = edges[index + 1] - edges[index]
        del self.experts.local_experts[own:]
        # Layer and router know the true number of experts from here on.
        self.config = self.router.config = config
        self._rebuild_router(config, kwargs)
        self.experts.sharded_state_dict = _DescribedByNumber(
            self.experts, config.num_moe_experts, edges[index]
        )
        # Number of an expert -> its slot among the padded numbers.
        slots = [
            rank * most + i for rank, (a, b) in enumerate(pairwise(edges)) for i in range(b - a)
        ]
        self.register_buffer("_slots", torch.tensor(slots), persistent=False)

    def _rebuild_router(self, config: Any, kwargs: dict[str, Any]) -> None:
        """Replace the router of the padded number of experts by the model's."""
        is_mtp_layer = kwargs.get("is_mtp_layer", False)
        self.router = self.submodules.router(
            config=config, pg_collection=kwargs["pg_collection"], is_mtp_layer=is_mtp_layer
        )
        if self.layer_number is not None:
            self.router.set_layer_number(self.layer_number)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Any:
        """Move each expert's column `[tokens, experts]` to the expert's slot."""
        if self._slots is not None:
            probs, routing_map = (self._in_slots(part) for part in (probs, routing_map))
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Send tokens to their experts' ranks.

        Megatron makes lists of its dispatcher's split sizes where it copies them from a GPU, which
        on a CPU it need not; the collective wants lists all the same.
        """
        for name in ("input_splits", "output_splits"):
            sizes = getattr(self.token_dispatcher, name, None)
            if isinstance(sizes, torch.Tensor) and not sizes.is_cuda:
                setattr(self.token_dispatcher, name, sizes.tolist())
        return super().dispatch(hidden_states, probs)

    def _in_slots(self, columns: torch.Tensor) -> torch.Tensor:
        assert self._slots is not None
        # [tokens, slots]; a slot without an expert stays 0.
        padded = columns.new_zeros(len(columns), self.token_dispatcher.config.num_moe_experts)
        return padded.index_copy(1, self._slots.to(columns.device), columns)


def _is_equal(edges: Sequence[int]) -> bool:
    return len({b - a for a, b in pairwise(edges)}) == 1


class _DescribedByNumber:
    """Description of a rank's experts for checkpoints, by their numbers among all of the layer.

    Megatron counts them as its rank times the experts of a rank.
    """

    def __init__(self, experts: SequentialMLP, num_experts: int, first: int) -> None:
        self._experts, self._num_experts, self._first = experts, num_experts, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted_singly():
            return SequentialMLP.sharded_state_dict(self._experts, *args, **kwargs)

    @contextmanager
    def _counted_singly(self) -> Iterator[None]:
        experts = self._experts
        saved = experts.ep_group, experts.num_local_experts
        num_experts, first = self._num_experts, self._first
        # As if each expert had a rank of its own, beginning with this rank's first.
        experts.ep_group = SimpleNamespace(size=lambda: num_experts, rank=lambda: first)
        experts.num_local_experts = 1
        try:
            yield
        finally:
            experts.ep_group, experts.num_local_experts = saved
