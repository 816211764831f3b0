"""Bytes of tensors held by a training rank, counted during the run."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_hetero.runtime.gradients.sync import gradient_sync


class _Kept:
    """A tensor kept by autograd, counted until autograd lets go."""

    def __init__(self, tensor: torch.Tensor, probe: LiveBytes) -> None:
        self.tensor = tensor
        self._probe = probe
        self._counts = probe.keep(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._counts:
            self._probe.let_go(self.tensor.untyped_storage())


class LiveBytes:
    """Observer of a run (`entry.Observer`); call `save` when it has ended.

    Activations are the tensors that autograd keeps for the backward pass, each storage once,
    weights left out. Their peak is taken over forward passes: what a backward pass recomputes is
    its working memory. Megatron may empty a storage that autograd keeps
    (`CheckpointWithoutOutput.discard_output_and_register_recompute`), so sizes are read anew.
    """

    def __init__(self) -> None:
        self._model: list[Any] = []
        self._sharded: list[Any] = []
        self._kept_parts: list[torch.Tensor] = []
        self._kept_gradients: list[torch.Tensor] = []
        self._weights: set[int] = set()
        self._kept: dict[int, tuple[torch.UntypedStorage, list[int]]] = {}
        self._peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor
        )

    def observe_log(self) -> None:
        """Ignore the log."""

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Return the provider of the data as it is."""
        return provider

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Start to count; memory left by Megatron's warm-up is no activation."""
        self._model = list(model)
        # Autograd keeps weights as well; their storages are told apart by address.
        self._weights = {p.untyped_storage().data_ptr() for p in self._parameters()}
        sync = gradient_sync(get_model_config(model[0]))
        if sync is not None:
            # Their whole weights come and go; what a rank keeps of them is elsewhere.
            self._sharded = list(sync.sharded.parameters)
            pieces = [piece for bucket in sync.sharded.buckets for piece in bucket.pieces()]
            self._kept_parts = [weights for *_, weights, _ in pieces]
            self._kept_gradients = [gradient for *_, gradient in pieces]
            self._weights -= {p.untyped_storage().data_ptr() for p in self._sharded}
            self._weights |= {p.untyped_storage().data_ptr() for p in self._kept_parts}
        self._hooks.__enter__()
        return model

    def keep(self, storage: torch.UntypedStorage) -> bool:
        """Count a tensor in `storage` kept by autograd, unless a weight; return True if counted."""
        address = storage.data_ptr()
        if address in self._weights:
            return False
        # A sharded layer's whole weights move from pass to pass, so that addresses are read anew.
        if any(p.untyped_storage().data_ptr() == address for p in self._sharded):
            return False
        # Views of one storage count once.  An address may be given again where a kept storage was
        # emptied; the storage itself is there until it is let go.
        _, count = self._kept.setdefault(storage._cdata, (storage, [0]))
        count[0] += 1
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            total = sum(held.nbytes() for held, _ in self._kept.values())
            self._peak = max(self._peak, total)
        return True

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """Forget a tensor in `storage` that autograd has dropped."""
        held = self._kept.get(storage._cdata)
        if held is None:
            return
        _, count = held
        count[0] -= 1
        if count[0] == 0:
            del self._kept[storage._cdata]

    def save(self, path: Path) -> None:
        """Write bytes by part, under the names of `DeviceEstimate.parts_bytes`."""
        self._hooks.__exit__(None, None, None)
        parameters = self._parameters()
        gradients = [p.main_grad for p in parameters if p.main_grad is not None]
        gradients += self._kept_gradients
        states: list[torch.Tensor] = []
        # Megatron hands its optimizers to nobody, so the garbage collector has to find them.
        for optimizer in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)]:
            states += [p for group in optimizer.param_groups for p in group["params"]]
            states += [
                t
                for state in optimizer.state.values()
                for t in state.values()
                if torch.is_tensor(t) and t.dim() > 0  # not a count of steps
            ]
        # An optimizer's parameters may be the model's own weights, which are counted there.
        not_weights = [t for t in states if t.untyped_storage().data_ptr() not in self._weights]
        parts = {
            "weights": _num_bytes([*(p.data for p in parameters), *self._kept_parts]),
            "gradients": _num_bytes(gradients),
            "optimizer": _num_bytes(not_weights),
            "activations": self._peak,
        }
        path.write_text(json.dumps(parts))

    def _parameters(self) -> list[Any]:
        return [p for chunk in self._model for p in chunk.parameters()]


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    """Sum the bytes of the tensors' storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
