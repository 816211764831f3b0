"""Seconds of one step of an engine: of a stage, and of a pipeline of unlike stages.

A step takes some tokens through all layers: those of prompts, in chunks, and one for each request
that decodes.  Prefill, decode and steps that mix both are the same formula: products read their
weights once for all tokens, attention of prompts is FLOPs, attention of decode reads keys and
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.network.collectives import ring_all_reduce_s
from megatron_hetero.errors import ProfileError
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.serving.prices.cache import widest_group
from megatron_hetero.serving.prices.engine import ENGINES, Engine
from megatron_hetero.serving.prices.kernels import CardSpeed, KernelSpeed, card_speed
from megatron_hetero.serving.prices.matrices import Matrix, layer_matrices
from megatron_hetero.serving.prices.measured import EngineStep, StepRatios
from megatron_hetero.serving.prices.served import ACTIVATION_BYTES, ServedModel
from megatron_hetero.serving.prices.work import StepWork

_PASSES_OF_ACTIVATIONS = 10.0
"""Times that the kernels between products read or write the hidden states of a layer: two norms
with their residuals, rotation, the activation, what is kept of keys and values."""
_NUM_SMALL_KERNELS = 6
_SMALL_KERNEL_S = 2e-6
"""Seconds of a small kernel between products in a captured graph; a usual figure of traces, not
fitted."""


@dataclass(frozen=True)
class ReplicaStage:
    """GPUs of the same type that hold consecutive layers."""

    gpu: GpuType
    width: int
    num_layers: int
    link: Link | None = None


@dataclass(frozen=True)
class StagePrice:
    """The price of steps on a stage.  `layers` has (number, matrices) of each kind of layer;
    `first` is the number of its first layer."""

    stage: ReplicaStage
    served: ServedModel
    layers: tuple[tuple[int, tuple[Matrix, ...]], ...]
    is_first: bool
    is_last: bool
    engine: Engine = ENGINES["vllm"]
    first: int = 0

    @cached_property
    def num_windowed(self) -> int:
        """Return the layers with a window of attention."""
        return sum(self.served.windowed[self.first : self.first + self.stage.num_layers])

    @cached_property
    def num_cached(self) -> int:
        """Return the layers whose keys and values share a block."""
        return widest_group(self.served.windowed, self.first, self.stage.num_layers)

    @cached_property
    def _speed(self) -> CardSpeed:
        precision = self.served.precision_on(self.stage.gpu) or "bf16"
        in_fp8 = self.served.weights == "fp8"
        return card_speed(self.stage.gpu, precision, in_fp8, self.engine.name)

    @cached_property
    def _ratios(self) -> StepRatios | None:
        profile, stage = self.engine.profile, self.stage
        if profile is None:
            return None
        case = stage.link, self.engine.name
        return profile.ratios(stage.gpu.name, stage.width, case, self._ratio_of)

    def seconds(self, work: StepWork) -> float:
        """Time a step on the stage, with the exchanges of its group: by tables, or as measured."""
        if work.tokens <= 0:
            return 0.0
        return self._ratios.seconds(work, self._tables_s) if self._ratios else self._tables_s(work)

    def _ratio_of(self, step: EngineStep) -> float:
        """Return how many times as long as by tables the GPUs took for a measured step.

        Raises:
            ProfileError: the step was shorter than the host's part of it.
        """
        is_whole = step.num_layers is None
        number = self.served.model.num_layers if step.num_layers is None else step.num_layers
        stage = replace(self.stage, width=step.width, num_layers=number)
        layers = _layers(self.served.model, 0, stage)
        price = StagePrice(stage, self.served, layers, is_whole, is_whole, self.engine)
        # The host's seconds are in a whole step, and `PipelinePrice` adds them.
        host_s = self.engine.step_s if is_whole else 0.0
        if step.seconds <= host_s:
            raise ProfileError(
                f"{step.where}: seconds {step.seconds}; the host alone takes {host_s} of a step of "
                "the whole model (give the number of layers if it was a part)"
            )
        return (step.seconds - host_s) / price._tables_s(step.work_within(self.served.window))

    def _tables_s(self, work: StepWork) -> float:
        speed, model, width = self._speed, self.served.model, self.stage.width
        total = 0.0
        # Products of all layers, by kind of layer.
        for number, matrices in self.layers:
            total += number * sum(self._product_s(m, work.tokens) for m in matrices)
        num_layers = sum(number for number, _ in self.layers)
        total += num_layers * self._between_s(work.tokens)
        # Layers with a window attend to fewer tokens.
        if self.num_windowed < num_layers:
            total += (num_layers - self.num_windowed) * self._attention_s(work)
        if self.num_windowed:
            total += self.num_windowed * self._attention_s(work.near())
        # Two all-reduces a layer: behind attention and behind the MLP.
        if width > 1:
            num_bytes = work.tokens * model.hidden_size * ACTIVATION_BYTES
            total += 2 * num_layers * all_reduce_s(num_bytes, width, self.stage.link)
        # Only tokens that are sampled go through the head.
        if self.is_last:
            head = Matrix(model.hidden_size, -(-model.vocab_size // width))
            total += self._matrix_s(head, work.sampled, ACTIVATION_BYTES, speed.products)
        return total

    def _product_s(self, matrix: Matrix, tokens: float) -> float:
        return self._matrix_s(matrix, tokens, self.served.weight_bytes, self._speed.products)

    @staticmethod
    def _matrix_s(
        matrix: Matrix, tokens: float, weight_bytes: float, speed: KernelSpeed
    ) -> float:  # fmt: skip
        # Rows that the experts compute together: each token goes to `active` of them.
        rows = tokens * matrix.active
        flops = 2.0 * rows * matrix.depth * matrix.columns
        # Weights of the experts that some token reaches are read once.
        touched = matrix.touched(tokens)
        read = touched * matrix.depth * matrix.columns * weight_bytes
        moved = rows * (matrix.depth + matrix.columns) * ACTIVATION_BYTES
        # An expert's matrix meets its own part of the rows.
        sizes = rows / max(1.0, touched), float(matrix.columns), float(matrix.depth)
        return speed.seconds(flops, read + moved, sizes=sizes)

    def _attention_s(self, work: StepWork) -> float:
        model, width = self.served.model, self.stage.width
        query, value = model.head_sizes
        heads = model.num_attention_heads / width
        prefill_s = self._prompts_s(work, heads, query, value)
        if not work.context:
            return prefill_s
        # Latent attention scores the latents themselves, which all heads share.
        size, kv_heads = query + value, self._kv_heads
        if model.kv_lora_rank:
            size, kv_heads = 2 * model.kv_lora_rank + model.qk_pos_emb_head_dim, 1.0
        # A request that decodes attends to its part of the tokens, once for each key-value head.
        decoding = max(1.0, work.decoding)
        sizes = max(1.0, work.context / decoding), decoding * kv_heads
        return prefill_s + self._speed.decode_attention.seconds(
            2.0 * work.context * heads * size, work.context * self.served.kv_bytes(width),
            sizes=sizes,
        )  # fmt: skip

    @cached_property
    def _kv_heads(self) -> float:
        """Key-value heads of a layer on a GPU."""
        model, width = self.served.model, self.stage.width
        return min(model.num_attention_heads / width, -(-model.num_query_groups // width))

    def _prompts_s(self, work: StepWork, heads: float, query: int, value: int) -> float:
        """Time attention of the step's chunks of prompts."""
        if not work.pairs:
            return 0.0
        tokens = max(1.0, work.tokens - work.decoding)
        mean_length = work.pairs / tokens
        # Keys and values of grouped queries are read once for the group.
        moved = tokens * (query + value) * (heads + self._kv_heads) * ACTIVATION_BYTES
        return self._speed.prefill_attention.seconds(
            2.0 * work.pairs * heads * (query + value), moved, 2.0 * mean_length,
            (query + value) / 2,
        )  # fmt: skip

    def _between_s(self, tokens: float) -> float:
        # Norms, residuals and the like are bound by memory, and each launch takes some time.
        num_bytes = _PASSES_OF_ACTIVATIONS * tokens * self.served.model.hidden_size
        moved_s = num_bytes * ACTIVATION_BYTES / self._speed.memory_bytes_per_s
        return moved_s + _NUM_SMALL_KERNELS * _SMALL_KERNEL_S


@dataclass(frozen=True)
class ReplicaPipeline:
    """Stages of a replica and the links between consecutive stages."""

    stages: tuple[ReplicaStage, ...]
    hops: tuple[Link, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of all stages."""
        return sum(stage.width for stage in self.stages)


class PipelinePrice:
    """Prices of steps on a replica.

    Args:
        pipeline: the replica.
        served: the model; its layers are those of all stages together.
        engine: whose steps they are.
    """

    def __init__(self, pipeline: ReplicaPipeline, served: ServedModel, engine: Engine) -> None:
        self.pipeline, self.served, self.engine = pipeline, served, engine
        self.stages = stage_prices(pipeline.stages, served, engine)
        # Stages that are alike take equally long: each kind is priced once.
        kinds = [
            (s.stage.gpu.name, s.stage.width, s.layers, s.num_windowed, s.is_last)
            for s in self.stages
        ]
        self._like = [kinds.index(kind) for kind in kinds]
        self._known: dict[StepWork, tuple[float, float]] = {}

    def times(self, work: StepWork) -> tuple[float, float]:
        """Time a step: from its start to its end through all stages, and the seconds after which
        the next batch may start, those of the slowest stage or hop."""
        if work not in self._known:
            # Equal work comes again and again in a simulation; the memory of it is bounded.
            if len(self._known) > 200_000:
                self._known.clear()
            # Stages that are alike are timed once.
            of_kind = {i: self.stages[i].seconds(work) for i in set(self._like)}
            parts = [of_kind[i] for i in self._like]
            num_bytes = work.tokens * self.served.model.hidden_size * ACTIVATION_BYTES
            # Between stages go the hidden states of every token.
            sends = [num_bytes / hop.bytes_per_s for hop in self.pipeline.hops]
            latency_s = sum(hop.latency_s for hop in self.pipeline.hops)
            total_s = sum(parts) + sum(sends) + latency_s + self.engine.step_s
            self._known[work] = total_s, max([*parts, *sends]) + self.engine.step_s
        return self._known[work]


def stage_prices(
    stages: Sequence[ReplicaStage], served: ServedModel, engine: Engine = ENGINES["vllm"]
) -> tuple[StagePrice, ...]:
    """Return the prices of consecutive stages, beginning with the first layer."""
    found, first = [], 0
    for place, stage in enumerate(stages):
        layers = _layers(served.model, first, stage)
        ends = place == 0, place == len(stages) - 1
        found.append(StagePrice(stage, served, layers, *ends, engine, first))
        first += stage.num_layers
    return tuple(found)


def all_reduce_s(num_bytes: float, width: int, link: Link | None) -> float:
    """Time an all-reduce of a group inside a machine: a ring, or, of few bytes, every GPU sends all
    of them to every other at once (the engines' custom all-reduce)."""
    if link is None or width == 1:
        return 0.0
    # Every GPU sends to all others at once: one latency, but all bytes to each.
    at_once = link.latency_s + (width - 1) * num_bytes / link.ring_bytes_per_s(width)
    return min(at_once, ring_all_reduce_s(num_bytes, width, link))


def _layers(
    model: ModelSpec, first: int, stage: ReplicaStage
) -> tuple[tuple[int, tuple[Matrix, ...]], ...]:  # fmt: skip
    if not model.kinds:
        return ((stage.num_layers, layer_matrices(model, stage.width)),)
    # Models with two kinds of layers have some of each on a stage, by its place.
    counts = model.kind_counts(first, stage.num_layers)
    return tuple(
        (number, layer_matrices(kind, stage.width))
        for number, kind in zip(counts, model.kinds, strict=True)
        if number
    )
