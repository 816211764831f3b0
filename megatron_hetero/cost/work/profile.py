"""profile.json: measured seconds of model pieces, used in place of the analytic model.

A point holds the time of one piece (a decoder layer, the embedding or the head) at one tensor
parallel width and micro-batch size, for one model shape.  Between two measured micro-batch sizes
times are interpolated; elsewhere the analytic model says how the time differs from that of the
nearest point (`gauge`), and the plan says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field

from megatron_hetero.cluster.catalogue import named_exactly
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.errors import ProfileError
from megatron_hetero.files import content_hash, read_json, validate_document
from megatron_hetero.files.format_version import Version1
from megatron_hetero.model.recompute import RecomputeModule, modules_if_selective
from megatron_hetero.model.spec import ModelSpec, Workload

PROFILE_SCHEMA_VERSION = 1
Piece = Literal["embedding", "decoder_layer", "head"]
PIECES: tuple[Piece, ...] = get_args(Piece)
PositiveInt = Annotated[int, Field(gt=0)]
_RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
Seconds = Annotated[float, Field(ge=0, le=1e5)]


class _Strict(BaseModel):
    # Built when the first profile is read: most plans have none.
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )


class ShapeModel(_Strict):
    """The sizes on which a piece's time depends, in Megatron's words."""

    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    seq_length: PositiveInt
    vocab_size: PositiveInt
    gated_mlp: bool = False
    num_experts: Annotated[int, Field(ge=0)] = 0
    moe_router_topk: Annotated[int, Field(ge=0)] = 0
    moe_ffn_hidden_size: Annotated[int, Field(ge=0)] = 0
    moe_shared_expert_intermediate_size: Annotated[int, Field(ge=0)] = 0
    q_lora_rank: Annotated[int, Field(ge=0)] = 0
    kv_lora_rank: Annotated[int, Field(ge=0)] = 0
    qk_head_dim: Annotated[int, Field(ge=0)] = 0
    qk_pos_emb_head_dim: Annotated[int, Field(ge=0)] = 0
    v_head_dim: Annotated[int, Field(ge=0)] = 0


class PointModel(_Strict):
    """One measurement, tensor-parallel communication included."""

    gpu: str
    precision: Literal["fp32", "bf16", "fp16"]
    tensor_parallel: PositiveInt
    micro_batch_size: PositiveInt
    piece: Piece
    recompute: Recompute = "none"
    recompute_modules: list[RecomputeModule] = Field(default_factory=list)
    sequence_parallel: bool = False
    shape: ShapeModel
    forward_s: Seconds
    backward_s: Seconds


class MeasuredType(_Strict):
    """Measurements of a GPU type and of the host, for any model; None is not measured."""

    launch_s: Annotated[float, Field(gt=0, le=1)] | None = None
    """Seconds of the host for each launched operator."""
    context_bytes: PositiveInt | None = None
    """Bytes of CUDA in one process."""
    communicator_bytes: PositiveInt | None = None
    """Buffers on a GPU of an NCCL communicator between two ranks of a machine."""


class ProfileModel(_Strict):
    """The content of profile.json. `provenance` says who measured, where, when and with which
    versions; `gpus`: figures of each GPU type."""

    version: Version1
    provenance: dict[str, str] = Field(min_length=1)
    points: list[PointModel] = Field(min_length=1, max_length=100_000)
    gpus: dict[str, MeasuredType] = Field(default_factory=dict)


NOT_MEASURED = MeasuredType()
_SIZES = tuple(ShapeModel.model_fields)


class PointKey(NamedTuple):
    """Everything but the micro-batch size that identifies a series of measurements."""

    gpu_name: str
    precision: str
    width: int
    piece: Piece
    recompute: Recompute
    sequence_parallel: bool
    shape: tuple[int, ...]
    recompute_modules: tuple[str, ...] = ()


class Measured(NamedTuple):
    """A measured time, or one between two measured micro-batch sizes."""

    width: int
    micro_batch_size: int
    recompute: Recompute
    recompute_modules: tuple[str, ...]
    sequence_parallel: bool
    times: PassTimes


class Stretch(NamedTuple):
    """Measured over predicted seconds of whole passes."""

    forward: float
    backward: float

    def of(self, times: PassTimes) -> PassTimes:
        """Scale times by the measured ratio."""
        return PassTimes(self.forward * times.forward_s, self.backward * times.backward_s)


NO_STRETCH = Stretch(1.0, 1.0)


@dataclass(frozen=True)
class Profile:
    """Measured times by piece: for each key, (micro-batch size, times) in ascending size.

    `stretches`: GPU type -> how many times as long its passes took in a training job as predicted
    (`report.text.changes.replan`); all its pieces are priced so much longer, measured and modelled
    ones.
    """

    points: Mapping[PointKey, tuple[tuple[int, PassTimes], ...]]
    content_sha256: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)
    stretches: Mapping[str, Stretch] = field(default_factory=dict)
    gpus: Mapping[str, MeasuredType] = field(default_factory=dict)

    def launch_s(self, gpu: GpuType) -> float:
        """Return the host's time for each operator: as cluster.yaml says, else as measured."""
        measured_s = self.gpus.get(gpu.name, NOT_MEASURED).launch_s
        return gpu.launch_s if gpu.has_own_launch_time or measured_s is None else measured_s

    def stretch(self, gpu_names: Iterable[str]) -> Stretch:
        """Return the stretch of a group of GPUs, the stretch of the group's slowest."""
        found = [self.stretches.get(name, NO_STRETCH) for name in gpu_names]
        return Stretch(max(s.forward for s in found), max(s.backward for s in found))

    @property
    def of_types(self) -> Profile:
        """Return what holds for any model."""
        return Profile({}, gpus=self.gpus)

    def nearest(
        self, workload: Workload, gpu_name: str, width: int, piece: Piece
    ) -> Measured | None:
        """Find the measurement of this model on this type with the nearest settings: the nearest
        width, if possible of the same recomputation and sequence parallelism, and then the nearest
        micro-batch size."""
        training = workload.training
        own = training.recompute, modules_if_selective(training)
        # Only points of this very shape and precision on this type.
        keys = self._keys(workload, gpu_name, piece)
        if not keys:
            return None

        def distance(key: PointKey) -> tuple[float, ...]:
            return (
                abs(log2(key.width / width)),
                (key.recompute, key.recompute_modules) != own,
                key.sequence_parallel != training.sequence_parallel,
                # None of two that are equally far is better; the same one always.
                key.width,
                _RECOMPUTES.index(key.recompute),
            )

        key = min(keys, key=distance)
        size, times = _at_size(self.points[key], training.micro_batch_size)
        settings = key.recompute, key.recompute_modules, key.sequence_parallel
        return Measured(key.width, size, *settings, times)

    def layer_sizes(self, workload: Workload, gpu_name: str) -> frozenset[int]:
        """Return the micro-batch sizes at which layers of this model were measured on a type."""
        keys = self._keys(workload, gpu_name, "decoder_layer")
        return frozenset(size for key in keys for size, _ in self.points[key])

    def _keys(self, workload: Workload, gpu_name: str, piece: Piece) -> Sequence[PointKey]:
        of = gpu_name, workload.training.precision, piece, _shape_key(workload.model)
        return self._keys_of.get(of, ())

    @cached_property
    def _keys_of(self) -> Mapping[tuple[str, str, Piece, tuple[int, ...]], Sequence[PointKey]]:
        """Group the keys by (GPU type, precision, piece, shape)."""
        found: dict[tuple[str, str, Piece, tuple[int, ...]], list[PointKey]] = {}
        for key in self.points:
            of = key.gpu_name, key.precision, key.piece, key.shape
            found.setdefault(of, []).append(key)
        return found


def _at_size(series: Sequence[tuple[int, PassTimes]], size: int) -> tuple[int, PassTimes]:
    """Interpolate between two measured micro-batch sizes, or take the nearest end."""
    # Beyond the measured sizes the end itself is returned, with its own size.
    sizes = [measured for measured, _ in series]
    if size <= sizes[0]:
        return series[0]
    if size >= sizes[-1]:
        return series[-1]
    at = bisect_left(sizes, size)
    (lower_size, lower), (upper_size, upper) = series[at - 1], series[at]
    # Linear between the two neighbours, in both passes.
    weight = (size - lower_size) / (upper_size - lower_size)
    return size, PassTimes(
        lower.forward_s + weight * (upper.forward_s - lower.forward_s),
        lower.backward_s + weight * (upper.backward_s - lower.backward_s),
    )


def load_profile(path: Path | str) -> Profile:
    """Read profile.json; GPUs are known by the catalogue's names, however the file spells them.

    Raises:
        FileFormatError: the file cannot be read as JSON.
        ProfileError: unknown keys, impossible values (a layer that takes no time), or a point
            measured twice.
    """
    document = read_json(path)
    model = validate_document(document, ProfileModel, ProfileError)
    # Points by key, then by micro-batch size.
    series: dict[PointKey, dict[int, PassTimes]] = {}
    for index, point in enumerate(model.points):
        key = PointKey(
            *(named_exactly(point.gpu) or point.gpu, point.precision, point.tensor_parallel),
            *(point.piece, point.recompute, point.sequence_parallel),
            *(_shape_key(point.shape), tuple(point.recompute_modules)),
        )
        # Two times for the same measurement leave it open which one holds.
        by_size = series.setdefault(key, {})
        if point.micro_batch_size in by_size:
            raise ProfileError(
                f"{document.locate(('points', index))}: points[{index}] repeats a measurement "
                f"({point.gpu}, {point.piece}, TP {point.tensor_parallel}, micro-batch "
                f"{point.micro_batch_size}); keep one of them"
            )
        if point.piece == "decoder_layer" and not (point.forward_s and point.backward_s):
            raise ProfileError(
                f"{document.locate(('points', index))}: points[{index}] says that a pass of a "
                f"decoder layer takes 0 s on {point.gpu}; write what was measured, in seconds, or "
                "leave the point out"
            )
        by_size[point.micro_batch_size] = PassTimes(point.forward_s, point.backward_s)
    gpus = {named_exactly(name) or name: found for name, found in model.gpus.items()}
    if len(gpus) < len(model.gpus):
        raise ProfileError(f"{document.locate(('gpus',))}: gpus has a GPU twice; keep one of them")
    return Profile(
        {key: tuple(sorted(by_size.items())) for key, by_size in series.items()},
        content_hash(document.data),
        dict(model.provenance),
        gpus=gpus,
    )


def profile_json_schema() -> dict[str, object]:
    """Return the JSON Schema of the file, for editors."""
    return ProfileModel.model_json_schema()


def _shape_key(shape: ModelSpec | ShapeModel) -> tuple[int, ...]:
    return tuple([int(getattr(shape, name)) for name in _SIZES])
