"""What exchanges of sharded layers add to passes, beside a replay of a pass layer by layer."""

from __future__ import annotations

import pytest

from megatron_hetero.cost.sync.sharded import exchange_times, slowest_layer
from megatron_hetero.cost.work.compute import PassTimes


def replayed_s(num_layers: int, arrives_s: float, leaves_s: float, layer_s: float) -> float:
    """Run a pass: one line carries what each layer asks for and sends, a layer computes when its
    weights are there, and asks for the next one's before."""
    line_s = arrives_s  # of the first layer
    now_s = line_s
    for number in range(num_layers):
        if number + 1 < num_layers:
            line_s = max(line_s, now_s) + arrives_s
        computed_s = now_s + layer_s
        # A layer begins when the one before has computed, its weights have come, and what was sent
        # before them is gone.
        now_s = max(computed_s, line_s)
        if leaves_s:
            line_s = now_s + leaves_s
    return max(now_s, line_s)


@pytest.mark.parametrize("layer_s", [0.0, 1.0, 2.5, 6.0])
def test_passes_wait_for_what_no_layer_hides(layer_s: float) -> None:
    for num_layers in range(1, 7):
        waits = exchange_times(num_layers, 2.0, 1.0, PassTimes(layer_s, 2 * layer_s), overlaps=True)
        forward_s = replayed_s(num_layers, 2.0, 0.0, layer_s)
        assert waits.forward_s + num_layers * layer_s == pytest.approx(forward_s)
        # In a replay what leaves may be gone before the next gather begins.
        backward_s = replayed_s(num_layers, 2.0, 1.0, 2 * layer_s)
        assert backward_s <= waits.backward_s + 2 * num_layers * layer_s + 1e-9
        assert waits.backward_s <= num_layers * 3.0


def test_one_by_one_every_exchange_counts() -> None:
    waits = exchange_times(10, 4.0, 3.0, PassTimes(3.0, 6.0), overlaps=False)
    assert waits == PassTimes(40.0, 70.0)
    assert exchange_times(10, 4.0, 3.0, PassTimes(3.0, 6.0), overlaps=True).forward_s == 13.0
    assert exchange_times(0, 4.0, 3.0, PassTimes(3.0, 6.0), overlaps=True) == PassTimes(0.0, 0.0)


def test_the_layer_is_of_the_slowest_replica_without_its_ends() -> None:
    passes, ends = [PassTimes(10.0, 20.0), PassTimes(9.0, 24.0)], [PassTimes(2.0, 4.0)] * 2
    assert slowest_layer(passes, ends, 4) == PassTimes(2.0, 5.0)
