"""Dealt steps in time: exact on single pipelines, and no step in which ranks wait for ever."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_hetero.schedule.orders.one_f_one_b import stage_order
from megatron_hetero.sequences.pipelines import WHOLE, PipelineRates, StageRates
from megatron_hetero.sequences.simulated_step import SimulatedStep
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens
from megatron_hetero.sequences.tree import step_seconds

THIRD = 1 / 3


def equal_stages(num_stages: int) -> PipelineRates:
    """A token takes a second on each stage."""
    counts = tuple(range(num_stages, 0, -1))
    return PipelineRates((StageRates(0.0, 1.0, 0.0, THIRD),) * num_stages, counts)


def alone(lengths: list[int], rank: int = 0) -> StepTokens:
    groups = [GroupTokens(rank, (k,), ((n,),), float(n)) for k, n in enumerate(lengths)]
    return StepTokens(tuple((group,) for group in groups))


def test_a_pipeline_on_its_own_is_1f1b_and_no_slower_than_priced() -> None:
    drawn = random.Random(3)
    for _ in range(60):
        num_stages, count = drawn.randint(1, 6), drawn.randint(1, 20)
        lengths = sorted(drawn.randint(1, 300) for _ in range(count))
        seconds = [float(n) for n in lengths]
        found = SimulatedStep(alone(lengths), [equal_stages(num_stages)]).seconds
        assert found == pytest.approx(makespan(seconds, num_stages))
        assert found <= step_seconds(seconds, num_stages - 1) * (1 + 1e-9)
        equal = SimulatedStep(alone([7] * count), [equal_stages(num_stages)]).seconds
        assert equal == pytest.approx(step_seconds([7.0] * count, num_stages - 1))


def makespan(seconds: list[float], num_stages: int) -> float:
    """1F1B on equal stages, written down once more."""
    orders = [stage_order(len(seconds), num_stages - s) for s in range(num_stages)]
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * num_stages, [0] * num_stages
    while any(at[s] < len(orders[s]) for s in range(num_stages)):
        for s in range(num_stages):
            if at[s] == len(orders[s]):
                continue
            kind, k = orders[s][at[s]].kind, orders[s][at[s]].micro_batch
            before = (kind, s - 1 if kind == "forward" else s + 1, k)
            if kind == "backward" and s == num_stages - 1:
                before = ("forward", s, k)
            if before not in ends and not (kind == "forward" and s == 0):
                continue
            part = THIRD if kind == "forward" else 1 - THIRD
            free[s] = max(free[s], ends.get(before, 0.0)) + part * seconds[k]
            ends[kind, s, k] = free[s]
            at[s] += 1
    return max(free)


def test_unlike_stages_and_boundaries_by_hand() -> None:
    stages = (StageRates(1.0, 0.0, 0.0, 0.5, 0.25, 0.5), StageRates(3.0, 0.0, 0.0, 0.5))
    # Forward 0.5, on the way 0.25 + 2 x 0.5, both passes 3, the same way back, backward 0.5.
    pipeline = PipelineRates(stages, (2, 1))
    found = SimulatedStep(alone([2]), [pipeline]).seconds
    assert found == pytest.approx(0.5 + 1.25 + 3 + 1.25 + 0.5)
    assert pipeline.other_stages == pytest.approx((1 + 2 * (0.25 + 8192 / 2)) / 3)


def test_groups_begin_together() -> None:
    pair, other = GroupTokens(0, (0,), ((3, 1),), 2.0), GroupTokens(1, (1,), ((4,),), 5.0)
    whole = [WHOLE, WHOLE]
    assert SimulatedStep(StepTokens(((other,), (pair,))), whole).seconds == pytest.approx(7.0)
    assert SimulatedStep(StepTokens(((pair,), (other,))), whole).seconds == pytest.approx(7.0)
    first = GroupTokens(0, (1,), ((4,),), 5.0)
    found = SimulatedStep(StepTokens(((first, other), (pair,))), whole).seconds
    assert found == pytest.approx(7.0)


def test_no_deal_to_pipelines_lets_ranks_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        step, pipelines = random_step(random.Random(seed))
        assert SimulatedStep(step, pipelines).seconds > 0

    # They would if a pipeline left out the micro-batches of others.
    def only_own(step: StepTokens, rank: int, num_stages: int = 1) -> list[GroupTokens | None]:
        return [g for groups in step.micro_batches for g in groups if rank in g.ranks]

    monkeypatch.setattr(StepTokens, "of_rank", only_own)
    rings = 0
    for seed in range(100):
        try:
            SimulatedStep(*random_step(random.Random(seed)))
        except RuntimeError:
            rings += 1
    assert rings > 10


def own(first: int, *seconds: float) -> GroupTokens:
    return GroupTokens(first, (0,), ((1,) * len(seconds),), max(seconds))


def random_step(drawn: random.Random) -> tuple[StepTokens, list[PipelineRates]]:
    """Micro-batches of random groups that lie side by side, some ranks idle."""
    num_stages, num_ranks = drawn.randint(1, 4), drawn.randint(2, 6)
    micro_batches = []
    for _ in range(drawn.randint(1, 8)):
        cuts = sorted(drawn.sample(range(num_ranks + 1), drawn.randint(2, num_ranks + 1)))
        groups = [(a, b - a) for a, b in pairwise(cuts)]
        kept = [g for g in groups if drawn.random() < 0.7] or groups[:1]
        micro_batches.append(tuple(own(a, *[drawn.random()] * size) for a, size in kept))
    return StepTokens(tuple(micro_batches)), [equal_stages(num_stages)] * num_ranks
