"""Measured steps: prices are exact where they were measured, and tables in their scale outside."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.errors import ProfileError, UsageError
from megatron_hetero.serving.prices.basis import price_basis
from megatron_hetero.serving.prices.engine import ENGINES, Engine
from megatron_hetero.serving.prices.measured import EngineStep, LogSurface, profile_for
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.prices.steps import PipelinePrice, ReplicaPipeline, ReplicaStage
from megatron_hetero.serving.prices.work import StepWork

SERVED = load_served(Path(__file__).resolve().parents[3] / "examples/serving", "16-bit", "16-bit")
LINK = Link(20e9, 1e-5)
DECODE = EngineStep(
    "L4", "vllm", "0.32", "llama", 1, "16-bit", "16-bit", "decode", 1, 500.0, 8, None, 0.1, "p:2"
)
STEPS = (
    DECODE, replace(DECODE, batch=64, seconds=0.2), replace(DECODE, context=2000.0, seconds=0.11),
    replace(DECODE, phase="prefill", batch=1, tokens=512, context=0.0, seconds=0.3),
    replace(DECODE, phase="prefill", batch=2, tokens=1024, context=300.0, seconds=1.5),
)  # fmt: skip


def _engine(*steps: EngineStep) -> Engine:
    return replace(ENGINES["vllm"], profile=profile_for(steps, "vllm", SERVED))


def _seconds(engine: Engine, work: StepWork, gpu: str = "L4", *stages: tuple[int, int]) -> float:
    parts = tuple(ReplicaStage(gpu_type(gpu), w, n, LINK) for w, n in stages or ((1, 32),))
    pipeline = ReplicaPipeline(parts, (LINK,) * (len(parts) - 1))
    return PipelinePrice(pipeline, SERVED, engine).times(work)[0]


def test_a_measured_step_takes_what_was_measured() -> None:
    engine = _engine(*STEPS)
    for step in STEPS:
        assert _seconds(engine, step.work) == pytest.approx(step.seconds, rel=1e-9)


def test_between_two_measured_steps_the_ratio_lies_between_theirs() -> None:
    few, many = STEPS[:2]
    measured, tables = _engine(few, many), ENGINES["vllm"]
    host_s = tables.step_s

    def ratio(batch: float) -> float:
        work = StepWork(batch, batch, 0.0, 500.0 * batch)
        return (_seconds(measured, work) - host_s) / (_seconds(tables, work) - host_s)

    # Half way of the logarithms of 8 and 64.
    middle = exp((log(8) + log(64)) / 2)
    assert ratio(middle) == pytest.approx((ratio(8) * ratio(64)) ** 0.5, rel=1e-6)
    # Beyond the edges the ratio of the edge holds.
    assert ratio(200) == pytest.approx(ratio(64)) and ratio(1) == pytest.approx(ratio(8))


def test_a_stage_is_priced_by_its_part_of_the_layers() -> None:
    """Twice as slow as the tables, as one stage and as two."""
    tables = ENGINES["vllm"]
    work = DECODE.work
    slow = replace(DECODE, seconds=2 * _seconds(tables, work) - tables.step_s)
    for stages in (((1, 32),), ((1, 20), (1, 12)), ((2, 16), (1, 16))):
        apart = [_seconds(e, work, "L4", *stages) for e in (_engine(slow), tables)]
        # The host and the hop are not the GPUs', and are not scaled.
        hop_s = 0.0 if len(stages) == 1 else LINK.latency_s + 8 * 4096 * 2 / LINK.bytes_per_s
        others = tables.step_s + hop_s
        assert apart[0] - others == pytest.approx(2 * (apart[1] - others), rel=1e-6)


def test_a_mixed_step_takes_both_phases_ratios() -> None:
    tables = ENGINES["vllm"]
    pure = [replace(s, num_layers=32) for s in (STEPS[0], STEPS[3])]
    both = _engine(*pure)
    mixed = StepWork(520.0, 8.0, STEPS[3].work.pairs, DECODE.work.context)
    ratios = [
        (_seconds(both, s.work) - tables.step_s) / (_seconds(tables, s.work) - tables.step_s)
        for s in pure
    ]
    found = (_seconds(both, mixed) - tables.step_s) / (_seconds(tables, mixed) - tables.step_s)
    assert min(ratios) < found < max(ratios)
    # A prompt's last token beside a decode: as many are sampled as there are tokens.
    last = StepWork(2.0, 2.0, 512.0, 500.0)
    assert 0 < _seconds(both, last) < 1


def test_a_phase_card_or_width_that_was_not_measured() -> None:
    only, tables = _engine(DECODE), ENGINES["vllm"]
    prompt = STEPS[3].work
    # Another phase and another card keep their tables; another width takes the nearest one's scale.
    assert _seconds(only, prompt) == _seconds(tables, prompt)
    assert _seconds(only, DECODE.work, "T4") == _seconds(tables, DECODE.work, "T4")
    wide = _seconds(only, DECODE.work, "L4", (4, 32)) / _seconds(tables, DECODE.work, "L4", (4, 32))
    assert wide == pytest.approx(0.1 / _seconds(tables, DECODE.work), rel=0.02)
    told = price_basis(gpu_type("L4"), 4, only)
    assert told.decode == "1 step measured at tp1 (vllm 0.32)"
    assert told.prefill == "table of kernels of L40S, as far as its watts go"
    assert price_basis(gpu_type("L40S"), 1, tables).prefill == "table of kernels"
    assert "median" in price_basis(gpu_type("V100-16GB"), 1, tables).decode


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"engine": "sglang"}, UsageError, "no step is of vllm with 16-bit weights"),
        ({"weights": "fp8"}, UsageError, "the steps are of vllm with fp8 weights"),
        ({"num_layers": 33}, ProfileError, "p:2: layers 33; .* has 32"),
        ({"width": 3}, ProfileError, "p:2: width 3; "),
    ],
)
def test_steps_that_cannot_count_are_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        profile_for([replace(DECODE, **change)], "vllm", SERVED)  # type: ignore[arg-type]


def test_steps_of_two_runs_are_refused() -> None:
    for change in ({"version": "0.33"}, {"model": "other"}):
        with pytest.raises(UsageError, match=r"other|0\.32 and 0\.33"):
            profile_for([DECODE, replace(DECODE, **change)], "vllm", SERVED)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"p:2: seconds 0\.0001; the host alone takes"):
        _seconds(_engine(replace(DECODE, seconds=1e-4)), DECODE.work)


def test_a_surface_is_exact_linear_on_a_line_and_flat_outside() -> None:
    rng = random.Random(4)
    points = [(rng.uniform(0, 8), rng.uniform(0, 8)) for _ in range(40)]
    values = [rng.uniform(-1, 1) for _ in points]
    surface = LogSurface(points, values)
    for point, value in zip(points, values, strict=True):
        assert surface.at(point) == pytest.approx(value, abs=1e-9)
    line = LogSurface([(0.0, 0.0), (1.0, 2.0), (3.0, 6.0)], [0.0, 1.0, -1.0])
    assert line.at((0.5, 1.0)) == pytest.approx(0.5)
    assert line.at((2.0, 4.0)) == pytest.approx(0.0)
    assert line.at((9.0, 99.0)) == pytest.approx(-1.0)
    assert LogSurface([(1.0, 1.0), (1.0, 1.0)], [2.0, 4.0]).at((7.0, -3.0)) == pytest.approx(3.0)
