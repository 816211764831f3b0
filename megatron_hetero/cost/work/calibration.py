"""Fractions of the peaks that GPUs reach, fitted to published tables of operators and layers.

`calibration.json` is made by `tools/make_calibration.py`, and `tools/cost_holdout.py` says how well
it predicts GPUs and widths that it was not fitted to.  A type that was measured has constants of
its own, one with the same chip shares them.  Any other reaches in a layer as large a part of its
fastest product (`GpuType.best_product`) as the measured types do, or what cards of half rate reach,
or the most that those of its compute capability do, or the median; and no more than the watts of
its board allow.  Fused attention reaches a part of what large products reach, by head size and
pass, from tables of its kernels; a type without one takes the median of those parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.fused_attention import DEFAULT, AttentionEfficiency, FusedAttention
from megatron_hetero.cost.work.products import NO_GROUPED, GemmEfficiency, GroupedCall
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.files import read_json
from megatron_hetero.model.training import Fp8Recipe, Precision


@dataclass(frozen=True)
class ScoreTraffic:
    """Elements that unfused attention without dropout moves for each score, in either pass."""

    forward: float
    backward: float


class _Kin(NamedTuple):
    """Most of what measured types of one compute capability reach: the part of the peak, and that
    part for each watt that a FLOP/s of the peak has.  `spread`: the latter over the least of the
    types.

    A table of models that are too small to fill a chip says too little, so the most counts.
    """

    part: float | None
    part_for_watts: float | None
    spread: float

    @classmethod
    def of(cls, reached: Sequence[tuple[GpuType, float]]) -> _Kin:
        """Take the most of types with the parts that they reach."""
        for_watts = [part / gpu.watts_per_flop for gpu, part in reached if gpu.watts_per_flop]
        return cls(
            max(part for _, part in reached),
            max(for_watts) if for_watts else None,
            max(for_watts) / min(for_watts) if for_watts else 1.0,
        )


_NO_KIN = _Kin(None, None, 1.0)


@dataclass(frozen=True)
class Calibration:
    """Constants by GPU type and kind of product.

    Kinds: "fp16" (16 bits, and fp32 by TF32), "fp32" (without tensor cores), "fp8" and "fp8_block".

    `dropout_slowdown`: how much longer dropout takes than its traffic (it draws random numbers);
    `same_chip`: types that share the constants of another one; `mixed`: most bytes a second of
    kernels that read operands of unlike shapes or precisions, by GPU type; `kernel_s`: seconds of a
    kernel that moves nothing, which each that memory bounds takes beside its bytes.
    """

    gemm: Mapping[tuple[str, str], GemmEfficiency]
    memory_efficiency: Mapping[str, float]
    score_traffic: Mapping[str, ScoreTraffic]
    dropout_slowdown: float
    attention: FusedAttention
    same_chip: Mapping[str, str]
    grouped: GroupedCall = NO_GROUPED
    mixed: Mapping[str, float] = field(default_factory=dict)
    kernel_s: float = 0.0

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Calibration:
        """Read the parsed content of `calibration.json`."""
        return cls(
            {
                (gpu, kind): GemmEfficiency(**curve)
                for gpu, by_kind in data["gemm"].items()
                for kind, curve in by_kind.items()
            },
            dict(data["memory_efficiency"]),
            {
                kind: ScoreTraffic(elements["forward"], elements["backward"])
                for kind, elements in data["score_traffic"].items()
            },
            data["dropout_slowdown"],
            FusedAttention.from_data(data["attention"]),
            dict(data["same_chip"]),
            GroupedCall(**data["grouped"]) if "grouped" in data else NO_GROUPED,
            dict(data.get("mixed_bytes_per_s", {})),
            data.get("kernel_s", 0.0),
        )

    def has_products(self, name: str) -> bool:
        """Return whether a GPU type, or a type of the same chip, has a table of products."""
        return (self.same_chip.get(name, name), "fp16") in self.gemm

    def fp8_efficiency(self, gpu: GpuType, recipe: Fp8Recipe) -> GemmEfficiency:
        """Return the curve of a GPU type's fp8 products, of its fp8 peak.

        A type without a table reaches as much of what it reaches in 16 bits as the median of those
        with one.

        Args:
            gpu: the type.
            recipe: scales of whole tensors and of blocks have kernels, and tables, of their own.
        """
        kind = "fp8" if recipe in ("tensorwise", "delayed") else "fp8_block"
        known = self.gemm.get((self.same_chip.get(gpu.name, gpu.name), kind))
        if known is not None:
            return known
        # No table: the median curve, scaled by the type's own part in 16 bits.
        usual, halves = self.gemm[DEFAULT, kind], self.gemm[DEFAULT, "fp16"]
        part = self.gemm_efficiency(gpu, "bf16").max_efficiency / halves.max_efficiency
        return replace(usual, max_efficiency=part * usual.max_efficiency)

    def gemm_efficiency(self, gpu: GpuType, precision: Precision) -> GemmEfficiency:
        """Return the curve of a GPU type, or the median curve where the type was not measured."""
        # Tensor cores serve fp32 too where TF32 is on.
        kind = "fp16" if precision != "fp32" or has_tf32(gpu) else "fp32"
        name = self.same_chip.get(gpu.name, gpu.name)
        known = self.gemm.get((name, kind))
        if known is not None:
            return known
        usual = self.gemm[DEFAULT, kind]
        if kind == "fp32":
            return usual
        return replace(usual, max_efficiency=self._general(gpu, usual.max_efficiency))

    def _general(self, gpu: GpuType, usual: float) -> float:
        """Return the part of its peak that a type without a table reaches.

        Args:
            gpu: the type.
            usual: what the median type reaches.
        """
        kin = self._by_capability.get(gpu.compute_capability, _NO_KIN)
        # A part of the type's best product, else what half rate reaches, else its kin, else all.
        if gpu.best_product and self._part_of_best:
            part = self._part_of_best * gpu.best_product
        elif gpu.half_rate and self._half_rate:
            part = self._half_rate
        else:
            part = kin.part or usual
        # A board of few watts does not keep it up.
        kept_up = self.most_for_watts(gpu)
        return part if kept_up is None else min(part, kept_up)

    def most_for_watts(self, gpu: GpuType) -> float | None:
        """Return the most of its 16-bit peak that a board's watts keep up, by measured types of its
        compute capability; None where there are none, or its watts are unknown."""
        kin = self._by_capability.get(gpu.compute_capability, _NO_KIN)
        if kin.part_for_watts is None or gpu.watts_per_flop is None:
            return None
        return self._slack * kin.part_for_watts * gpu.watts_per_flop

    @cached_property
    def _part_of_best(self) -> float | None:
        """Return the median over measured types of a layer's efficiency over the fastest product's;
        None without such types."""
        parts = [
            curve.max_efficiency / gpu.best_product
            for gpu, curve in self._measured
            if gpu.best_product
        ]
        return median(parts) if parts else None

    @cached_property
    def _half_rate(self) -> float | None:
        """Return the median part of the peak that measured cards of half rate reach; None without
        such cards."""
        parts = [curve.max_efficiency for gpu, curve in self._measured if gpu.half_rate]
        return median(parts) if parts else None

    @cached_property
    def _by_capability(self) -> Mapping[str | None, _Kin]:
        """Return what measured types of full rate reach, by compute capability."""
        kin: dict[str, list[tuple[GpuType, float]]] = {}
        for gpu, curve in self._measured:
            if gpu.compute_capability and not gpu.half_rate:
                kin.setdefault(gpu.compute_capability, []).append((gpu, curve.max_efficiency))
        return {capability: _Kin.of(own) for capability, own in kin.items()}

    @cached_property
    def _slack(self) -> float:
        """Return how much more FLOPs a measured type gets of a watt than another of the same
        compute capability: so much no sheet of watts can say."""
        return max((kin.spread for kin in self._by_capability.values()), default=1.0)

    @cached_property
    def _measured(self) -> tuple[tuple[GpuType, GemmEfficiency], ...]:
        """Return the types with a curve of their own in 16 bits."""
        return tuple(
            (gpu_type(name), curve)
            for (name, kind), curve in self.gemm.items()
            if kind == "fp16" and name in gpu_type_names() and name not in self.same_chip
        )

    def attention_efficiency(
        self, gpu: GpuType, head_size: int, seq_length: int
    ) -> AttentionEfficiency:
        """Return the parts of the rate of large products that fused attention reaches.

        Args:
            gpu: the type.
            head_size: elements of a head's queries.
            seq_length: tokens of a sequence in one call; a part of it in a context-parallel ring.
        """
        name = self.same_chip.get(gpu.name, gpu.name)
        return self.attention.reached(name, head_size, seq_length)

    def memory_bytes_per_s(self, gpu: GpuType) -> float:
        """Return the memory bandwidth that streaming operators reach."""
        name = self.same_chip.get(gpu.name, gpu.name)
        efficiency = self.memory_efficiency.get(name, self.memory_efficiency[DEFAULT])
        return gpu.memory_bytes_per_s * efficiency

    def mixed_bytes_per_s(self, gpu: GpuType) -> float:
        """Return the bandwidth that torch's element-wise kernels reach whose operands are unlike in
        shape or precision: these load element by element, and a chip does so many in a second."""
        streaming = self.memory_bytes_per_s(gpu)
        return min(streaming, self.mixed.get(self.same_chip.get(gpu.name, gpu.name), streaming))


@cache
def shipped_calibration() -> Calibration:
    """Read the constants of `calibration.json`."""
    return Calibration.from_data(read_json(Path(__file__).with_name("calibration.json")).data)


def has_tf32(gpu: GpuType) -> bool:
    """Return whether fp32 products run on tensor cores: from compute capability 8.0 on.

    torch leaves TF32 off by itself; NVIDIA's containers, in which Megatron is mostly run, switch it
    on, and the tables show it on.
    """
    capability = gpu.compute_capability
    return capability is not None and float(capability) >= 8.0 and bool(gpu.peak_flops.get("bf16"))


def product_flops_per_s(gpu: GpuType, precision: Precision) -> float:
    """Return the dense peak of matrix products in the job's precision. TF32 has half of bf16's.

    Raises:
        UnsupportedError: the GPU cannot train in it.
    """
    peak = gpu.peak_flops.get(precision)
    half = gpu.peak_flops.get("bf16")
    if precision == "fp32" and has_tf32(gpu) and half:
        return max(half / 2, peak or 0.0)
    if peak is None:
        raise UnsupportedError(f"{gpu.name} cannot train in {precision}")
    return peak
