"""Bundles by hand."""

from __future__ import annotations

import pytest

from megatron_hetero.planner.columns.bundles import Bundle
from megatron_hetero.planner.columns.pricing import BundleShape
from megatron_hetero.planner.completion.filled import Filled
from megatron_hetero.planner.shapes.kinds import NodeBlock


def bundle(num_replicas: int, fill_s: float, period_s: float, *kinds: int) -> Bundle:
    blocks = tuple(NodeBlock(kind, 1, (1,)) for kind in kinds)
    filled = Filled((1,) * len(kinds), (), None, 1, fill_s, period_s)
    return Bundle(BundleShape(num_replicas, blocks), filled)


def test_micro_batches_of_a_bundle_by_hand() -> None:
    """The first one after 5 s, then one every 2 s, on each of three replicas."""
    one = bundle(3, 5.0, 2.0, 0)
    assert one.micro_batches(4.9) == 0.0
    assert one.micro_batches(5.0) == 3.0
    assert one.micro_batches(11.0) == pytest.approx(12.0)


def test_node_layers_by_block() -> None:
    blocks = NodeBlock(0, 1, (1, 1)), NodeBlock(1, 1, (1,))
    one = Bundle(BundleShape(1, blocks), Filled((2, 3, 1), (), None, 1, 1.0, 1.0))
    assert list(one.node_layers) == [(0, 5), (1, 1)]
