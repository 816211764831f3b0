"""A model of a few parameters in fp64, divided as a GPT is, in Megatron's own DDP.

Its "backward pass" gives every parameter a gradient that is known beforehand by its global name, so
that what the sync makes of it can be compared with plain arithmetic on whole tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.plan.sharding.shards import shard_edges
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.parallel.building import build_groups
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.shards import TIED_EMBEDDING, global_parameters, shard_of
from megatron_hetero.runtime.parallel.tensor_place import TensorPlace, set_tensor_place
from tests.runtime.workloads import plan as plan_of

HIDDEN, GROUPS, COLUMNS, VOCABULARY = 6, 12, 24, 24


@dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dim: int | None = None
    """Divided along; None: every rank has all of it."""
    sequence_parallel: bool = False


_LAYER = {
    "input_layernorm.weight": _Spec((HIDDEN,), sequence_parallel=True),
    "self_attention.linear_qkv.weight": _Spec((3 * GROUPS, HIDDEN), 0),
    "self_attention.linear_proj.weight": _Spec((HIDDEN, 2 * GROUPS), 1),
    "mlp.linear_fc1.weight": _Spec((2 * COLUMNS, HIDDEN), 0),
    "mlp.linear_fc2.weight": _Spec((HIDDEN, COLUMNS), 1),
    "mlp.linear_fc2.bias": _Spec((HIDDEN,)),
}


class ToyModel(torch.nn.Module):
    """One rank's part of the model; `layers` are global layer numbers."""

    share_embeddings_and_output_weights = True

    def __init__(self, place: TensorPlace, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self._add("embedding.word_embeddings.weight", _Spec((VOCABULARY, HIDDEN), 0), place)
        for layer in layers:
            for name, spec in _LAYER.items():
                self._add(f"decoder.layers.{layer}.{name}", spec, place)
        if last:
            norm = _Spec((HIDDEN,), sequence_parallel=True)
            self._add("decoder.final_layernorm.weight", norm, place)
            if not first:
                self._add("output_layer.weight", _Spec((VOCABULARY, HIDDEN), 0), place)
                # As Megatron marks the copy of a tied embedding.
                self.output_layer.weight.shared = True

    def _add(self, name: str, spec: _Spec, place: TensorPlace) -> None:
        shape = list(spec.shape)
        if spec.dim is not None:
            edges, own = place.part_of(name)
            shape[spec.dim] = shape[spec.dim] * (edges[own + 1] - edges[own]) // edges[-1]
        parameter: Any = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        parameter.tensor_model_parallel = spec.dim is not None
        parameter.partition_dim = -1 if spec.dim is None else spec.dim
        parameter.partition_stride = 1
        parameter.sequence_parallel = spec.sequence_parallel
        module: torch.nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, parameter)


class ToyRank:
    """One rank of a plan that holds a `ToyModel`.  Construction is collective."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sequence_parallel: bool,
        overlap: bool,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.plan, self.rank = plan, rank
        self.place = rank_table(plan)[rank]
        self.groups: RankGroups = build_groups(plan, timedelta(minutes=2))
        stages = plan.replicas[self.place.replica].stages
        stage = stages[self.place.stage]
        width, shares = stage.shape.tensor_parallel, stage.shape.shares
        place = TensorPlace(
            width,
            self.place.tensor_rank,
            shard_edges(GROUPS, width, shares),
            *[shard_edges(COLUMNS, width, shares)] * 3,
            tuple(range(width + 1)),
            is_even=shares is None,
        )
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, gated_linear_unit=True
        )
        config.sequence_parallel = sequence_parallel
        set_tensor_place(config, place)
        self.config = config
        self.is_first, self.is_last = self.place.stage == 0, stage is stages[-1]
        layers = range(stage.first_layer, stage.first_layer + stage.shape.num_layers)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=dtype == torch.bfloat16,
                overlap_grad_reduce=overlap,
                check_for_nan_in_grad=True,
            ),
            self._toy(config, place, layers).to(dtype),
            pg_collection=self.groups.collection(),
        )
        self.parameters = dict(global_parameters([self.model]))
        self.shards = {n: shard_of(n, p, config) for n, p in self.parameters.items()}

    def _toy(self, config: TransformerConfig, place: TensorPlace, layers: range) -> ToyModel:
        made = ToyModel(place, layers, self.is_first, self.is_last)
        made.config = config  # as every model of Megatron's has it
        return made

    def backward(self, step: int, scale: float = 1.0) -> None:
        """All micro-batches of this rank's replica; the last one outside of `no_sync`."""
        count = self.plan.replicas[self.place.replica].num_micro_batches
        for k in range(count):
            quiet = self.model.no_sync() if k < count - 1 else contextlib.nullcontext()
            with quiet:
                terms = [
                    (parameter * self._gradient(name, step, k).to(parameter)).sum()
                    for name, parameter in self.parameters.items()
                ]
                (sum(terms) * scale).backward()  # type: ignore[union-attr]

    def _gradient(self, name: str, step: int, micro_batch: int) -> torch.Tensor:
        shard, shape = self.shards[name], self.shards[name].global_shape
        replica = self.place.replica
        whole = torch.zeros(shape, dtype=torch.float64)
        for use in self._uses(name):
            whole += random_gradient(name, shape, step, replica, micro_batch, use)
        if shard.is_partial:
            # Parts of a sum over the tensor-parallel group, as sequence parallelism leaves them.
            width = self.groups.tensor.size()
            parts = torch.linspace(1.0, 2.0, width, dtype=torch.float64)
            whole = whole * (parts / parts.sum())[self.place.tensor_rank]
        size = self.groups.context.size()
        if size > 1:
            # Parts of a sum over tokens, of which each context-parallel rank has some.
            parts = torch.linspace(1.0, 3.0, size, dtype=torch.float64)
            whole = whole * (parts / parts.sum())[self.place.context_rank]
        return self.part(name, whole)

    def _uses(self, name: str) -> list[int]:
        """A tied embedding has a gradient where tokens come in (0) and one where they go out."""
        if name != TIED_EMBEDDING:
            return [0]
        return [use for use, here in enumerate((self.is_first, self.is_last)) if here]

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global tensor."""
        shard = self.shards[name]
        pieces = [whole.narrow(shard.dim, a, b - a) for a, b in shard.intervals]
        return torch.cat(pieces, dim=shard.dim)


def random_gradient(
    name: str, shape: tuple[int, ...], step: int, replica: int, micro_batch: int, use: int
) -> torch.Tensor:
    """The gradient of one micro-batch with respect to a whole parameter."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(name[-12:])) % 100_003
    generator = torch.Generator().manual_seed(
        seed + 7 * step + 1_009 * replica + 100_019 * micro_batch + 1_000_003 * use
    )
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def whole_gradients(plan: Plan, step: int) -> dict[str, torch.Tensor]:
    """The sum over all micro-batches of the job, of every parameter, by plain arithmetic."""
    num_layers = plan.layout.replicas[0].num_layers
    return {
        name: sum(  # type: ignore[misc]
            random_gradient(name, spec.shape, step, r, k, use)
            for r, replica in enumerate(plan.replicas)
            for k in range(replica.num_micro_batches)
            for use in ((0, 1) if name == TIED_EMBEDDING else (0,))
        )
        for name, spec in _whole_model(num_layers)
    }


def _whole_model(num_layers: int) -> Iterator[tuple[str, _Spec]]:
    yield TIED_EMBEDDING, _Spec((VOCABULARY, HIDDEN), 0)
    for layer in range(num_layers):
        for name, spec in _LAYER.items():
            yield f"decoder.layers.{layer}.{name}", spec
    yield "decoder.final_layernorm.weight", _Spec((HIDDEN,))


def in_world(layout: str, check: Callable[[int], None], folder: Path) -> None:
    """Run `check(rank)` on every rank of the layout, over gloo."""

    def run(rank: int) -> None:
        backend.activate_cpu_backend()
        world = World.from_environment()
        dist.init_process_group("gloo", store=world.store(), rank=world.rank, world_size=world.size)
        check(rank)
        dist.barrier()

    run_jobs([LocalJob("toy", plan_of(layout).layout.num_devices, run, folder)], 120)
