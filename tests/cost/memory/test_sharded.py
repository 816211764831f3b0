"""Straight lines of memory against the memory of each number of sharded layers."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hetero.cost.memory.sharded import ShardedMemory
from megatron_hetero.cost.memory.stage import StageMemory

PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "libraries", "reserve")
SIZES = st.fixed_dictionaries({part: st.integers(0, 1 << 36) for part in PARTS})
COPIES = st.just(0) | st.integers(1, 1 << 38)
"""Of gradients, during the update."""


@given(
    base=SIZES,
    per_layer=SIZES,
    part=st.sampled_from([1 / 2, 1 / 3, 1 / 7, 0.8]),
    is_cut_alike=st.booleans(),
    sums_apart=st.booleans(),
    overlaps=st.booleans(),
    copies=st.tuples(COPIES, COPIES),
)
@example(
    base=dict.fromkeys(PARTS, 0),
    per_layer=dict.fromkeys(PARTS, 0) | {"weights": 1000, "gradients": 100, "activations": 10},
    part=1 / 2,
    is_cut_alike=True,
    sums_apart=True,
    overlaps=False,
    copies=(0, 30),
)
def test_the_greater_line_is_the_peak(
    base: dict[str, int],
    per_layer: dict[str, int],
    part: float,
    is_cut_alike: bool,
    sums_apart: bool,
    overlaps: bool,
    copies: tuple[int, int],
) -> None:
    of_base, of_layer = copies
    whole = StageMemory(
        base, per_layer, 1 << 40, update_base_bytes=of_base, update_layer_bytes=of_layer
    )
    sharded = ShardedMemory(
        part, is_cut_alike=is_cut_alike, sums_apart=sums_apart, overlaps=overlaps
    )
    layers, numbers = np.arange(1, 6)[:, None], np.arange(6)[None, :]
    peaks = np.maximum(*sharded.lines(whole, numbers, layers))
    for num_layers in range(1, 6):
        assert peaks[num_layers - 1, 0] == whole.peak_bytes(num_layers)
        for number in range(1, num_layers + 1):
            made = sharded.of(whole, number, num_layers)
            assert peaks[num_layers - 1, number] == made.peak_bytes(num_layers)
