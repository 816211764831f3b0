"""Recorder of one rank's training, whose file `record` reads.

The same recorder observes both runs, through Megatron's `post_wrap_hooks` and a wrapper around its
log: at the same points, and without other changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker
from megatron.core.utils import get_model_config
from safetensors.numpy import save_file

from megatron_hetero.lab.verify.processes import stock_division
from megatron_hetero.lab.verify.processes.late_weights import arrive_late
from megatron_hetero.lab.verify.processes.record import DRAWN, SKIPPED, STOCK_DRAWN
from megatron_hetero.lab.verify.processes.routing import Routers
from megatron_hetero.runtime.gradients.memory import data, main_grad, main_weight
from megatron_hetero.runtime.gradients.sync import GradientSync, gradient_sync
from megatron_hetero.runtime.megatron import training_log
from megatron_hetero.runtime.model.initial_weights import initialise
from megatron_hetero.runtime.model.samples.provider import EveryRankProvider
from megatron_hetero.runtime.parallel.boundary import Boundary
from megatron_hetero.runtime.parallel.pipeline import boundaries_of
from megatron_hetero.runtime.parallel.shards import ParameterShard, global_parameters, shard_of

_REGIONS = "model-parallel-rng"
"""Megatron's name of the state of tensor-parallel regions (`tensor_parallel.random`)."""


class Recorder:
    """Observer of one rank's training; call `save` when it has ended."""

    def __init__(self, routers: Routers | None = None, records_main: bool = False) -> None:
        """Prepare a record.

        Args:
            routers: keeps or replays the choice of experts.
            records_main: weights are the optimizer's main weights, where this rank has them all.
        """
        self._routers = routers
        self._weight = main_weight if records_main else data
        self._records_main = records_main
        self._arrays: dict[str, numpy.ndarray] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._shards: dict[str, ParameterShard] = {}
        self._losses: dict[int, float] = {}
        self._norms: dict[int, str] = {}
        self._loss_scales: dict[int, float] = {}
        self._samples: list[int] = []
        self._model: list[Any] = []
        self._sync: GradientSync | None = None
        self._boundaries: Mapping[int, Boundary] = {}
        self._late: frozenset[str] = frozenset()
        self._due: int | None = None

    def observe_log(self) -> None:
        """Start observing the loop's log; call it after Megatron is imported."""
        training_log.add_observer(self._observe_step)

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Store the parameters, and record gradients as the optimizer will see them."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.training import get_args

        # The shards of all parameters, which say where they belong in the whole model.
        config = get_model_config(model[0])
        self._parameters = dict(global_parameters(model))
        self._shards = {
            name: shard_of(name, parameter, config) for name, parameter in self._parameters.items()
        }
        # A checkpoint takes the place of these weights after this hook.
        for name, parameter in self._parameters.items():
            self._arrays[DRAWN + name] = _array(parameter.data)
        self._model = model
        self._sync = gradient_sync(config)
        self._boundaries = boundaries_of(config)
        if self._sync is not None:
            self._late = arrive_late(self._sync)
        # Called at the end of the backward passes, before norm, clipping and update.
        inner = config.finalize_model_grads_func or finalize_model_grads

        def finalize(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            self._keep_late_weights()
            # Where the optimizer is divided, each rank has the sums of its own part alone.
            if self._sync is not None:
                self._sync.weights.gather(main_grad)
            else:
                stock_division.gather_gradients(model)
            done = get_args().curr_iteration
            # Before the first update of this run: the initial weights.
            if not self._norms:
                if self._sync is not None:
                    self._sync.sharded.make_whole()
                self._keep("weight", done, self._weight)
            # fp16 scales losses, and gradients with them; the record is without the scale.
            scale = float(config.grad_scale_func(torch.ones(1, device="cuda")))
            self._loss_scales[done + 1] = scale
            self._keep("gradient", done + 1, main_grad, scale)

        config.finalize_model_grads_func = finalize
        if self._routers is not None:
            self._routers.attach(model)
        return model

    def recorded(self, provider: Callable[..., Sequence[Any]]) -> EveryRankProvider:
        """Return a provider of the same datasets that notes the samples read."""

        def provide(num_samples: Any) -> tuple[Any, ...]:
            train, *others = provider(num_samples)
            return (train and _RecordedDataset(train, self._samples), *others)

        return EveryRankProvider(provide)

    def _keep(
        self,
        kind: str,
        step: int,
        tensor: Callable[[Any], torch.Tensor],
        scale: float = 1.0,
        without: frozenset[str] = frozenset(),
    ) -> None:
        for name, parameter in self._parameters.items():
            if name in without:
                continue
            value = _array(tensor(parameter))
            self._arrays[f"{kind}/{step}/{name}"] = value / numpy.float32(scale)

    def _observe_step(self, iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
        # Only last stages have losses.
        if "lm loss" in loss_dict:
            self._losses[iteration] = float(loss_dict["lm loss"])
        self._norms[iteration] = SKIPPED if grad_norm is None else float(grad_norm).hex()
        # Weights have to be whole on every rank before they are kept.
        if self._sync is None:
            stock_division.gather_weights(self._model)
        else:
            self._sync.sharded.make_whole()
        self._keep("weight", iteration, self._weight, without=self._late)
        self._due = iteration
        if self._sync is not None:
            # The next pass gathers them itself, as it does without a record.
            self._sync.sharded.release()

    def _keep_late_weights(self) -> None:
        """Record the weights that travelled until the passes of this step needed them."""
        if self._due is not None:
            others = frozenset(self._parameters) - self._late
            self._keep("weight", self._due, self._weight, without=others)
        self._due = None

    def save(self, path: Path) -> None:
        """Write `path.safetensors` and `path.json`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Weights of the last update may still travel.
        if self._sync is not None:
            self._sync.weights.finish_under_way()
        self._keep_late_weights()
        arrays: dict[str, Any] = dict(self._arrays)
        if self._routers is not None:
            arrays |= self._routers.arrays()
        save_file(arrays, path.with_suffix(".safetensors"))
        meta = {
            "shards": [asdict(s) for s in self._shards.values()],
            "losses": self._losses,
            "norms": self._norms,
            "loss_scales": self._loss_scales,
            "samples": self._samples,
            "random_state": _digest(torch.cuda.get_rng_state()),
            "region_state": _digest(get_cuda_rng_tracker().get_states()[_REGIONS]),
            "flips": None if self._routers is None else asdict(self._routers.flips()),
            # Ranks without main weights, which the comparison treats by their type.
            "rounded": {
                name: str(self._weight(p).dtype)
                for name, p in self._parameters.items()
                if self._records_main and self._weight(p).dtype != torch.float32
            },
            "traffic": None if self._sync is None else asdict(self._sync.traffic),
            "boundaries": {n: asdict(b.traffic) for n, b in self._boundaries.items()},
        }
        path.with_suffix(".json").write_text(json.dumps(meta))


def _array(tensor: torch.Tensor) -> numpy.ndarray:
    """Copy a tensor; numpy would hold on to memory that sharded layers give back."""
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


class DrawingRecorder(Recorder):
    """Recorder of a process of stock Megatron with initial weights independent of the layout.

    They are drawn as those of a plan (`runtime.model.initial_weights`), and are what its ranks
    should start with.
    """

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        from megatron.training import get_args

        for name, parameter in global_parameters(model):
            self._arrays[STOCK_DRAWN + name] = _array(parameter.data)
        initialise(model, get_args().seed)
        return super().post_wrap_hook(model)


def _digest(state: Any) -> str:
    """Return a digest of a random state, which some trackers keep as a generator."""
    flat = convert_cuda_rng_state(state)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()


class _RecordedDataset(torch.utils.data.Dataset):
    def __init__(self, dataset: Any, samples: list[int]) -> None:
        self._dataset = dataset
        self._samples = samples

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._samples.append(int(index))
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)
