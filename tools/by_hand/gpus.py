"""Data sheets of GPUs, and what large products reach of them: the constants of the sheet of paper.

Typed from the vendors' documents, not from the catalogue of megatron_hetero.  Dense peaks with fp32
accumulation; GeForce cards run that at half the rate of their fp16 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

_FUSED = (64, 1.032, 0.737), (128, 1.049, 0.737), (256, 1.049, 0.696)
_FUSED_ON_A100 = (128, 0.862, 0.738), (256, 0.770, 0.575)
EXTRA_TOKENS = 382, 605
"""Of fused attention: a sequence costs as if it were so much longer, forward and backward."""


@dataclass(frozen=True)
class Gpu:
    """A card: TFLOP/s of 16-bit products, GB/s of memory, GiB that CUDA shows; what products and
    streaming reach of the peaks, and microseconds that each product takes beside its FLOPs.
    `fused`: head size, and what fused attention reaches of large products, forward and backward.

    Turing and Volta have no bf16 and no FlashAttention-2 (`is_old`).
    """

    tflops: float
    gb_per_s: float
    gib: float
    reached: float = 0.7585
    streamed: float = 0.968
    product_us: float = 23.2
    is_old: bool = False
    fused: tuple[tuple[int, float, float], ...] = _FUSED


# What is reached of the peaks are measurements, which no paper gives: docs/cost-model.md says which
# tables they come from.  Types without one have 0.925 of the fastest product that a public list has
# (A6000: 0.925 * 131.2 / 154.8); GeForce cards that it lacks the mean of RTX 2080 Ti and 3090; any
# other the median of the six (the default above).  Attention: the table of that page, or
# its medians.
GPUS = {
    # WP-08608, Tesla V100 whitepaper: 125 TFLOP/s, 900 GB/s.
    "V100-16GB": Gpu(125, 900, 15.77, 0.711, 0.985, 18.6, is_old=True),
    "V100-32GB": Gpu(125, 900, 31.74, 0.711, 0.985, 18.6, is_old=True),
    # WP-09183, Turing whitepaper: 65 and 320; 53.8 (107.6 with fp16 accumulation) and 616.
    "T4": Gpu(65, 320, 14.58, is_old=True),
    "RTX-2080-Ti": Gpu(53.8, 616, 10.75, 1.028, 1.049, 21.4, is_old=True),
    # A100 data sheet: 312 dense; 1,555 GB/s with 40 GB, 2,039 with 80 GB (SXM).
    "A100-40GB": Gpu(312, 1555, 39.39, 0.806, 0.982, 25.0, fused=_FUSED_ON_A100),
    "A100-80GB": Gpu(312, 2039, 79.15, 0.806, 0.906, 25.0, fused=_FUSED_ON_A100),
    # GA102 whitepaper: 71 and 936; the professional cards accumulate in fp32 at the full rate.
    "RTX-3090": Gpu(71, 936, 23.65, 1.003, 0.955, 34.1, fused=((64, 1.043, 0.736),)),
    "RTX-A5000": Gpu(111.1, 768, 23.65, 0.782),
    "RTX-A6000": Gpu(154.8, 768, 47.43, 0.784),
    "A10": Gpu(125, 600, 22.06),
    "A40": Gpu(149.7, 696, 44.35),
    # Ada whitepaper v2 and data sheets (halves of what they print with sparsity).
    "RTX-4080": Gpu(97.5, 716.8, 15.60, 1.0155),
    "RTX-4090": Gpu(165.2, 1008, 23.52, 1.001, fused=((64, 1.022, 0.756), (128, 1.055, 0.765))),
    "RTX-6000-Ada": Gpu(364.2, 960, 47.37, 0.707),
    "L4": Gpu(121, 300, 21.95, 0.699),
    "L40S": Gpu(362, 864, 44.40, 0.644),
    # H100 whitepaper: SXM5 989.4 and 3,352; PCIe 756 and 2,039.  RTX Blackwell whitepaper: 209.5.
    "H100-80GB": Gpu(
        989.4, 3352, 79.11, 0.583, 0.838, 27.2, fused=((128, 1.167, 0.962), (256, 1.245, 0.675))
    ),
    "H100-PCIe": Gpu(756, 2039, 79.11, 0.611),
    "RTX-5090": Gpu(209.5, 1792, 31.36, 1.0155),
    # CDNA 3 data sheet: 1,307.4 and 5,300.
    "MI300X": Gpu(1307.4, 5300, 191.98, 0.558),
}
