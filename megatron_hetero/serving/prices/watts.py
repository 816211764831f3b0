"""How much of what a chip can do the watts of its board keep up, for cards without a table."""

from __future__ import annotations

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import shipped_calibration


def part_kept_up(gpu: GpuType, peak: float) -> float:
    """Return what is left of the speed of a card's kernels, 1 where its watts take nothing or
    training has a table of its chip.

    Measured cards of its compute capability say what a watt can do, as they do in training.

    Args:
        gpu: the card.
        peak: part of the sheet that its kernels reach by the table of another card.
    """
    calibration = shipped_calibration()
    most = calibration.most_for_watts(gpu)
    if most is None or calibration.has_products(gpu.name):
        return 1.0
    return min(1.0, most / peak)
