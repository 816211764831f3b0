"""Sailor's cost model: the published anchors to four digits, by the plain enumeration."""

from __future__ import annotations

import pytest

from tools.referees.drawn_cases import drawn_cases
from tools.referees.plain_enumeration import best_iterations_per_s
from tools.referees.sailor import Group, Sailor, fewest_micro_batches, pipelines_of
from tools.referees.sailor_tables import Fit

ZONE = "us-central1-a"


def test_the_best_shape_of_s3() -> None:
    referee = Sailor("OPT-350", 4)
    chain = (Group(ZONE, "V100-16", 4, 4), Group(ZONE, "A100-40", 4, 4))
    pipelines = pipelines_of([((6, 18), chain)] * 16)
    step_s = referee.step_s(pipelines, fewest_micro_batches(1024, 4, 16))
    assert round(1 / step_s, 4) == 0.2697
    assert referee.missing_bytes(pipelines) < 0


@pytest.mark.parametrize(
    ("gpus", "anchor"),
    [({"A100-40": 8, "V100-16": 8}, 0.0445), ({"A100-40": 32}, 0.1297)],
)
def test_anchors(gpus: dict[str, int], anchor: float) -> None:
    assert round(best_iterations_per_s("OPT-350", 1024, gpus, 7), 4) == anchor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "anchor"),
    [
        ("OPT-350", {"A100-40": 32, "V100-16": 32}, 0.1505),
        ("OPT-350", {"A100-40": 64, "V100-16": 64}, 0.2697),
        ("OPT-350", {"A100-40": 32, "V100-16": 96}, 0.1984),
        ("OPT-350", {"A100-40": 128, "V100-16": 384}, 0.5862),
        ("OPT-350", {"A100-40": 256, "V100-16": 256}, 0.7257),
        ("OPT-350", {"A100-40": 512}, 1.0205),
        ("GPT-Neo-2.7", {"A100-40": 16, "V100-16": 16}, 0.0135),
    ],
)
def test_larger_anchors(model: str, gpus: dict[str, int], anchor: float) -> None:
    sequences, max_stages = (1024, 7) if model == "OPT-350" else (2048, 11)
    assert round(best_iterations_per_s(model, sequences, gpus, max_stages), 4) == anchor


def test_unlike_cuts_are_pipelines_of_their_own_and_exchange_whole_stages() -> None:
    """By hand: rings of two over 4 bytes a parameter of the longest pipeline's largest stage."""
    referee = Sailor("OPT-350", 4)
    a100 = Group(ZONE, "A100-40", 4, 4)
    pipelines = pipelines_of([((12, 12), (a100, a100)), ((24,), (a100,))])
    assert [p.layers for p in pipelines] == [(12, 12), (24,)]
    largest = max(referee.stage_params_bytes((12, 12)))
    fit = referee.tables.fit(a100.single, a100.single)
    assert fit is not None
    full, rest = divmod(largest, 5e8)
    expected_s = 2 * (full * fit.time_s(2.5e8) + fit.time_s(rest / 2))
    assert referee.sync_s(pipelines) == pytest.approx(expected_s)
    slowest_s = max(referee.lockstep_s(p, 3) for p in pipelines)
    assert referee.step_s(pipelines, 3) == pytest.approx(slowest_s + expected_s)


def test_like_replicas_wait_for_the_slowest_at_every_stage() -> None:
    referee = Sailor("OPT-350", 2)
    fast, slow = Group(ZONE, "A100-40", 2, 4), Group(ZONE, "V100-16", 2, 4)
    mixed = pipelines_of([((12, 12), (fast, slow)), ((12, 12), (slow, fast))])[0]
    both_slow = pipelines_of([((12, 12), (slow, slow))])[0]
    compute_s = sum(referee.compute_s((12, 12), (slow, slow)))
    assert referee.lockstep_s(mixed, 8) > 8 * compute_s / 2
    assert referee.lockstep_s(mixed, 8) >= referee.lockstep_s(both_slow, 8)


def test_fits_are_read_within_their_range() -> None:
    fit = Fit(0.0, 1.0, 5.0, 6e9)
    assert fit.time_s(1e6) == pytest.approx(1e6 / 5e9)
    assert fit.time_s(1e9) == pytest.approx(1e9 / 6e9)
    assert fit.time_s(1e3) == pytest.approx(1e3 / 2e9)
    assert fit.time_s(0) == 0


def test_of_three_types_the_enumeration_takes_what_is_best_for_any_two_of_them() -> None:
    gpus = {"RTX-3090": 8, "RTX-2080": 8, "Titan-RTX": 4}
    best = best_iterations_per_s("OPT-350", 64, gpus, 3, (1, 2))
    for left_out in gpus:
        two = {gpu: number for gpu, number in gpus.items() if gpu != left_out}
        assert 0 < best_iterations_per_s("OPT-350", 64, two, 3, (1, 2)) <= best


def test_cases_of_a_hash_are_the_same_again_and_large() -> None:
    cases = list(drawn_cases("a hash"))
    assert cases == list(drawn_cases("a hash"))
    assert cases != list(drawn_cases("another hash"))
    for number, case in enumerate(cases):
        machines = case["cluster"]["machines"]
        assert 512 <= sum(of["gpus"] * of["count"] for of in machines) <= 1024
        assert len(machines) == 2 + number % 2
