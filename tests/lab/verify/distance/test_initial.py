"""Initial weights beside Megatron's own draw: scales, constants and copies."""

from __future__ import annotations

import numpy

from megatron_hetero.lab.verify.distance.initial import first_unlike_draw
from megatron_hetero.lab.verify.processes.record import RankRecord


def record(own: dict[str, numpy.ndarray], stock: dict[str, numpy.ndarray]) -> RankRecord:
    return RankRecord({}, {}, {}, {}, [], drawn=own, stock_drawn=stock)


def drawn(seed: int, scale: float = 0.02, size: int = 1024) -> numpy.ndarray:
    return numpy.random.default_rng(seed).normal(0, scale, size).astype("float32")


def test_other_numbers_of_one_distribution_are_equal() -> None:
    for seed in range(50):
        assert first_unlike_draw(record({"a": drawn(seed)}, {"a": drawn(seed + 1000)})) is None


def test_an_unscaled_output_layer_is_found() -> None:
    found = first_unlike_draw(record({"a": drawn(0)}, {"a": drawn(1, 0.02 / 8**0.5)}))
    assert found is not None and "standard deviation of 0.0194" in found


def test_a_constant_has_to_be_megatrons() -> None:
    one, zero = numpy.ones(8, "float32"), numpy.zeros(8, "float32")
    assert first_unlike_draw(record({"norm": one}, {"norm": one})) is None
    assert "constant 0" in str(first_unlike_draw(record({"bias": one}, {"bias": zero})))


def test_layers_that_are_copies_are_found_whatever_their_scale() -> None:
    same = {"layers.0": drawn(0), "layers.1": drawn(0, 0.02)}
    apart = {"layers.0": drawn(1), "layers.1": drawn(2)}
    assert first_unlike_draw(record(same, apart)) == "layers.0 and layers.1 start alike"
    assert first_unlike_draw(record(apart, apart)) is None
