"""A single process with casts in the places of a plan's unlike precisions: the reference of such a
plan.

The model is stock Megatron's in fp32: its weights are the main weights. Each layer, the embedding
and the output layer get their weights and inputs cast to the precision in which the stage that
holds them computes, in the replica whose micro-batch it is. Nothing of the runtime's own handling
of precisions is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.nn.utils.stateless import _reparametrize_module

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.verify.distance.start import Rounding
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import mixes_precisions, stage_precisions
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.batches import deal

_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_EMBEDDING, _OUTPUT = -1, -2
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TIED = "word_embeddings.weight"


@dataclass(frozen=True)
class ReplicaCasts:
    """Precisions of one replica's layers, embedding and output layer.

    `is_one_stage`: embedding and output layer are on one, which casts a weight of both once.
    """

    layers: tuple[torch.dtype, ...]
    embedding: torch.dtype
    output: torch.dtype
    is_one_stage: bool

    def of(self, place: int) -> torch.dtype:
        if place == _EMBEDDING:
            return self.embedding
        return self.output if place == _OUTPUT else self.layers[place]


@dataclass
class Casts:
    """Casts of the one process.

    Args:
        replicas: the casts of each replica.
        order: [micro-batch of a step] -> its replica.
    """

    replicas: tuple[ReplicaCasts, ...]
    order: tuple[int, ...]
    _calls: int = 0
    _shared: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def attach(self, model: Sequence[Any]) -> list[Any]:
        """Attach to a new model of Megatron's with a single chunk: the `pre_wrap_hook`."""
        (gpt,) = model
        # A forward pass is a micro-batch, which says whose precisions count.
        gpt.register_forward_pre_hook(self._next_micro_batch)
        self._wrap(gpt.embedding, _EMBEDDING)
        for number, layer in enumerate(gpt.decoder.layers):
            self._wrap(layer, number)
        # The last norm belongs to the stage of the output layer.
        if gpt.decoder.final_layernorm is not None:
            self._wrap(gpt.decoder.final_layernorm, _OUTPUT)
        self._wrap(gpt.output_layer, _OUTPUT)
        return list(model)

    def start(self, gpt: Any) -> None:
        """Round the weights as the plan's first replica holds them: all others start from it."""
        with torch.no_grad():
            for name, parameter in gpt.named_parameters():
                parameter.copy_(parameter.to(self.replicas[0].of(_place(name))))

    def _next_micro_batch(self, gpt: Any, inputs: Any) -> None:
        if self._calls == 0:
            self.start(gpt)
        self._calls += 1
        self._shared.clear()

    @property
    def _replica(self) -> ReplicaCasts:
        return self.replicas[self.order[(self._calls - 1) % len(self.order)]]

    def _wrap(self, module: Any, place: int) -> None:
        inner: Callable[..., Any] = module.forward

        def forward(*given: Any, **named: Any) -> Any:
            # The precision of this module in the replica of the present micro-batch.
            dtype = self._replica.of(place)
            _tell_softmax(module, dtype)
            own = {
                name: self._cast(parameter, dtype, name)
                for name, parameter in module.named_parameters()
            }
            # The tied output layer is given the embedding's weight.
            if isinstance(named.get("weight"), torch.nn.Parameter):
                named["weight"] = self._cast(named["weight"], dtype, _TIED)
            # The module computes with cast weights; gradients flow back to the fp32 ones.
            with _reparametrize_module(module, own):
                return inner(*_cast(given, dtype), **_cast(named, dtype))

        module.forward = forward

    def _cast(self, parameter: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Cast a weight; a tied one once for both of its uses, where one stage has both."""
        if name != _TIED or not self._replica.is_one_stage:
            return parameter.to(dtype)
        if dtype not in self._shared:
            self._shared[dtype] = parameter.to(dtype)
        return self._shared[dtype]


def start_rounding(plan: Plan, job: Precision) -> Rounding | None:
    """Return the rounding of one process's fp32 weights to the ranks' starting weights, under
    unlike precisions: first to the first replica's precision, then to the rank's own."""
    if not mixes_precisions(plan, job):
        return None
    # [replica][stage].
    table = stage_precisions(plan, job)
    first = _replica_casts(plan.replicas[0].stages, table[0])
    own = [_DTYPES[table[place.replica][place.stage]] for place in rank_table(plan)]

    def rounded(rank: int, name: str, whole: numpy.ndarray) -> numpy.ndarray:
        # All replicas start from the weights that the first one has rounded.
        started = torch.from_numpy(whole).to(first.of(_place(name)))
        value: numpy.ndarray = started.to(own[rank]).float().numpy()
        return value

    return rounded


def casts_of(plan: Plan, job: Precision, micro_batch_size: int, is_reversed: bool) -> Casts:
    """Return the casts of one process beside a plan.

    Args:
        plan: the plan, with fewer layers.
        job: the precision of stages without their own.
        micro_batch_size: sequences of the one process's micro-batches.
        is_reversed: it takes each step's micro-batches last to first.
    Raises:
        UnsupportedError: replicas of unlike precisions have micro-batches of unlike sizes.
    """
    replicas = tuple(
        _replica_casts(replica.stages, precisions)
        for replica, precisions in zip(plan.replicas, stage_precisions(plan, job), strict=True)
    )
    sizes = {r.micro_batch_size or micro_batch_size for r in plan.replicas}
    if len(sizes) > 1 and len(set(replicas)) > 1:
        raise UnsupportedError(
            f"replicas with micro-batches of unlike sizes ({', '.join(map(str, sorted(sizes)))} "
            "sequences) and unlike precisions cannot be compared with one process, whose "
            "micro-batches are of one size. Verify the plan with one size."
        )
    # Which replica trains each of a step's micro-batches, in the order of the one process.
    counts = [replica.num_micro_batches for replica in plan.replicas]
    dealt = deal(counts, [1] * len(counts))
    owner = {batch.start: r for r, batches in enumerate(dealt) for batch in batches}
    order = [owner[n] for n in sorted(owner)]
    return Casts(replicas, tuple(reversed(order) if is_reversed else order))


def _replica_casts(stages: Sequence[Any], precisions: Sequence[Precision]) -> ReplicaCasts:
    by_layer: dict[int, torch.dtype] = {}
    for stage, precision in zip(stages, precisions, strict=True):
        for chunk in stage_chunks(stage):
            layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
            by_layer |= dict.fromkeys(layers, _DTYPES[precision])
    return ReplicaCasts(
        tuple(by_layer[n] for n in sorted(by_layer)),
        _DTYPES[precisions[0]],
        _DTYPES[precisions[-1]],
        len(stages) == 1,
    )


def _place(name: str) -> int:
    """Return the layer of a parameter; parameters before and after the layers have numbers too."""
    layer = _LAYER.search(name)
    if layer is not None:
        return int(layer.group(1))
    return _EMBEDDING if "embedding." in name else _OUTPUT


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the activations among what a layer is given; positions and sums over them stay."""
    if isinstance(value, tuple):
        return tuple(_cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {n: v if n.startswith("rotary") else _cast(v, dtype) for n, v in value.items()}
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _tell_softmax(module: Any, dtype: torch.dtype) -> None:
    """Set the precision of scores on the softmax of a layer, as Megatron's configuration would."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    for part in module.modules():
        if isinstance(part, FusedScaleMaskSoftmax):
            part.input_in_fp16 = dtype == torch.float16
            part.input_in_bf16 = dtype == torch.bfloat16
            part.input_in_float16 = part.input_in_fp16 or part.input_in_bf16
