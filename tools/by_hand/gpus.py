"""Data sheets of GPUs, and what large products reach of them: the constants of the sheet of paper.

Typed from the vendors' documents, not from the catalogue of megatron_hetero.  Dense peaks with fp32
accumulation; GeForce cards run that at half the rate of their fp16 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_FUSED = (64, 0.95, 0.73), (128, 0.95, 0.73), (256, 0.95, 0.68)
_FUSED_ON_A100 = (128, 0.82, 0.70), (256, 0.73, 0.54)
_FUSED_ON_H100 = (128, 0.84, 0.69), (256, 0.90, 0.49)
EXTRA_TOKENS = 330, 479
"""Of fused attention: a sequence costs as if it were so much longer, forward and backward."""
CALL_US = 34, 85
"""Microseconds that a call of fused attention takes beside its FLOPs, forward and backward."""


@dataclass(frozen=True)
class Gpu:
    """A card: TFLOP/s of 16-bit products, GB/s of memory, GiB that CUDA shows; what a product of
    one TFLOP and streaming reach of the peaks, and microseconds that each product takes beside its
    FLOPs.  `unhidden`: part of the time of a product's bytes that does not hide behind its FLOPs;
    `decline`: the time of FLOPs grows as their power 1 + `decline`.  `mixed_gb_per_s`: most
    that kernels of unlike operands stream; most cards stream all alike.  `fused`: head size, and
    what fused attention reaches of that rate, forward and backward.

    Turing and Volta have no bf16 and no FlashAttention-2 (`is_old`).
    """

    tflops: float
    gb_per_s: float
    gib: float
    reached: float = 0.808
    streamed: float = 0.968
    product_us: float = 4.3
    is_old: bool = False
    fused: tuple[tuple[int, float, float], ...] = _FUSED
    unhidden: float = 0.58
    decline: float = 0.042
    mixed_gb_per_s: float = inf

    def product_s(self, rows: float, inputs: float, outputs: float, element: int) -> float:
        """Time one product of a matrix of rows x inputs with one of inputs x outputs."""
        flops = 2 * rows * inputs * outputs
        slower: float = max((flops / 1e12) ** self.decline, min(1.0, self.reached))
        moved = (rows * inputs + inputs * outputs + rows * outputs) * element
        seconds: float = flops * slower / (self.reached * self.tflops * 1e12)
        return seconds + self.unhidden * moved / (self.gb_per_s * 1e9) + self.product_us * 1e-6


@dataclass(frozen=True)
class Nvlink:
    """NCCL over NVLink: microseconds of a call and of each step, and the part of the bandwidth, by
    the protocols of small buffers and by that of large ones.  `parts`: of 2, 4 and 8 GPUs;
    `gather`: of that, in all-gathers and reduce-scatters.  A link of no more than 64 GB/s is PCIe.
    """

    small: tuple[float, float, float]
    large: tuple[float, float]
    gather: float
    parts: dict[int, float]

    def seconds(self, size: float, cards: int, passes: int, speed: float) -> float:
        """Time a collective: an all-reduce in two passes, a gather or a reduce-scatter in one."""
        if cards not in self.parts:
            raise ValueError(f"no NVLink of {cards} cards is typed in")
        steps = passes * (cards - 1)
        sent = steps / cards * size
        call, step, part = self.small
        small = (call + steps * step) * 1e-6 + sent / (part * speed)
        reached = speed * self.parts[cards] * (self.gather if passes == 1 else 1.0)
        call, step = self.large
        return min(small, (call + steps * step) * 1e-6 + sent / reached)


# Measured too: docs/cost-model.md, "Over NVLink".
_AMPERE = Nvlink((10.6, 0.79, 0.339), (36.1, 0.46), 0.909, {2: 0.857, 4: 0.974, 8: 1.0})
_HOPPER = Nvlink((5.3, 0.85, 0.355), (16.2, 1.43), 0.836, {2: 0.716, 4: 0.878, 8: 1.0})
NVLINKS = {"A100-40GB": _AMPERE, "A100-80GB": _AMPERE, "H100-80GB": _HOPPER}
# What is reached of the peaks are measurements, which no paper gives: docs/cost-model.md says which
# tables they come from.  Types without one have 0.93 of the fastest product that a public list has
# (A6000: 0.93 * 131.2 / 154.8); GeForce cards that it lacks the mean of RTX 2080 Ti and 3090; any
# other the median of those with one (the default above).  A card of few watts has at most 1.136
# times what its watts are by a card of the same generation: T4 by the TITAN RTX (0.664 at 280 W and
# 130.5 TFLOP/s), L4 and RTX 6000 Ada by the L40S, H100 PCIe by the H100.  Attention: the table
# of that page, or its medians.
GPUS = {
    # WP-08608, Tesla V100 whitepaper: 125 TFLOP/s, 900 GB/s.
    "V100-16GB": Gpu(125, 900, 15.77, 0.714, 0.986, 28.9, is_old=True),
    "V100-32GB": Gpu(125, 900, 31.74, 0.714, 0.986, 28.9, is_old=True),
    # WP-09183, Turing whitepaper: 65 and 320; 53.8 (107.6 with fp16 accumulation) and 616.
    # 70 W.
    "T4": Gpu(65, 320, 14.58, 1.136 * 0.664 * (70 / 65) / (280 / 130.5), is_old=True),
    "RTX-2080-Ti": Gpu(53.8, 616, 10.75, 1.018, 1.05, 21.5, is_old=True),
    # A100 data sheet: 312 dense; 1,555 GB/s with 40 GB, 2,039 with 80 GB (SXM).
    "A100-40GB": Gpu(312, 1555, 39.39, 0.843, 0.969, 9.7, False, _FUSED_ON_A100, 0.328, 0.0),
    "A100-80GB": Gpu(312, 2039, 79.15, 0.843, 0.891, 9.7, False, _FUSED_ON_A100, 0.328, 0.0),
    # GA102 whitepaper: 71 and 936; the professional cards accumulate in fp32 at the full rate.
    "RTX-3090": Gpu(71, 936, 23.65, 0.959, 0.978, 38.7, fused=((64, 1.07, 0.75),)),
    "RTX-A5000": Gpu(111.1, 768, 23.65, 0.785),
    "RTX-A6000": Gpu(154.8, 768, 47.43, 0.787),
    "A10": Gpu(125, 600, 22.06),
    "A40": Gpu(149.7, 696, 44.35),
    # Ada whitepaper v2 and data sheets (halves of what they print with sparsity).
    "RTX-4080": Gpu(97.5, 716.8, 15.60, 0.99),
    "RTX-4090": Gpu(165.2, 1008, 23.52, 1.005, fused=((64, 1.01, 0.73), (128, 1.04, 0.74))),
    # 300 W and 72 W, the L40S 350 W.
    "RTX-6000-Ada": Gpu(364.2, 960, 47.37, 1.136 * 0.612 * (300 / 364.2) / (350 / 362)),
    "L4": Gpu(121, 300, 21.95, 1.136 * 0.612 * (72 / 121) / (350 / 362)),
    "L40S": Gpu(362, 864, 44.40, 0.612, 0.834, 1.8, unhidden=0.73, decline=0.09),
    # H100 whitepaper: SXM5 989.4 and 3,352; PCIe 756 and 2,039.  RTX Blackwell whitepaper: 209.5.
    "H100-80GB": Gpu(
        *(989.4, 3352, 79.11, 0.808, 0.851, 4.2, False, _FUSED_ON_H100, 0.49, 0.052),
        mixed_gb_per_s=2610,
    ),
    # 350 W, the others 700 W.
    "H100-PCIe": Gpu(756, 2039, 79.11, 1.136 * 0.808 * (350 / 756) / (700 / 989.4)),
    "RTX-5090": Gpu(209.5, 1792, 31.36, 0.99),
    # CDNA 3 data sheet: 1,307.4 and 5,300.
    "MI300X": Gpu(1307.4, 5300, 191.98, 0.560),
}
