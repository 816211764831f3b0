"""Dealt steps end under NCCL's rules, whatever their groups; one that leaves a micro-batch out does
not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.proof.circle import describe
from megatron_hetero.schedule.proof.gradients import ALL_LATE, NONE_LATE
from megatron_hetero.schedule.proof.of_plan import How, job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from megatron_hetero.sequences.proof import every_group_dealt
from megatron_hetero.sequences.tree import GroupKind, GroupTree, TreeGroup
from tests.runtime.workloads import plan, workload
from tools.nests import halved

Dealt = tuple[tuple[tuple[int, int], ...], ...]


def random_plan(rng: random.Random) -> tuple[Plan, list[tuple[int, int]]]:
    """Runs of replicas alike, and the nested groups in each run."""
    words, groups, first = [], [], 0
    for _ in range(rng.randint(1, 2)):
        num_stages, num = rng.randint(1, 3), rng.choice((1, 2, 2, 3, 4))
        stages = ",".join(
            f"tp{rng.randint(1, 2)}:{1 if s else 5 - num_stages}" for s in range(num_stages)
        )
        words += [f"{stages} @1"] * num
        groups += [(first + a, first + b) for a, b in _nested(halved(range(num)))]
        first += num
    asked = plan(" | ".join(words))
    if rng.random() < 0.5:
        ahead = rng.randint(0, 3)
        replicas = []
        for replica in asked.replicas:
            stages_ahead = tuple(
                replace(stage, num_launched_forwards=len(replica.stages) - s + ahead)
                for s, stage in enumerate(replica.stages)
            )
            replicas.append(replace(replica, stages=stages_ahead))
        asked = replace(asked, replicas=tuple(replicas))
    return asked, groups


def _nested(nest: object) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []

    def ranks(of: object) -> list[int]:
        if not isinstance(of, tuple):
            assert isinstance(of, int)
            return [of]
        own = [rank for part in of for rank in ranks(part)]
        found.append((own[0], own[-1] + 1))
        return own

    ranks(nest)
    return found


def random_deal(rng: random.Random, num_replicas: int, groups: list[tuple[int, int]]) -> Dealt:
    """Each micro-batch has some of the groups, no two with a replica in common."""
    micro_batches = []
    for _ in range(rng.randint(1, 9)):
        of = [(r, r + 1) for r in range(num_replicas)]
        for first, stop in rng.sample(groups, len(groups)):
            if rng.random() < 0.6 and all(b - a == 1 for a, b in of[first:stop]):
                of[first:stop] = [(first, stop)] * (stop - first)
        micro_batches.append(of)
    return tuple(zip(*micro_batches, strict=True))


def operations_end(asked: Plan, how: How, **training: bool) -> bool:
    full = tuple(replace(r, num_micro_batches=len(how.dealt[0])) for r in asked.replicas)
    job = job_operations(replace(asked, replicas=full), workload(**training), how)
    return not blocked_ranks(job)


def test_random_dealt_steps_end() -> None:
    rng = random.Random(41)
    num_divided = 0
    for _ in range(60):
        asked, groups = random_plan(rng)
        dealt = random_deal(rng, len(asked.replicas), groups)
        num_divided += any(b - a > 1 for of in dealt for a, b in of)
        for late in (NONE_LATE, rng.randint(-1, 4), ALL_LATE):
            how = How(True, rng.random() < 0.5, deepest_late=late, dealt=dealt)
            in_sequence = rng.random() < 0.5
            assert operations_end(
                asked, how, overlap_grad_reduce=True, sequence_parallel=in_sequence
            ), (asked.layout, how)
    assert num_divided > 30


def test_a_replica_that_leaves_a_micro_batch_out_is_found() -> None:
    asked = plan("tp1:2,tp1:2 @2 | tp1:2,tp1:2 @4 | tp1:2,tp1:2 @2")
    both, all_three = (0, 2), (0, 3)
    dealt = ((both, all_three), (both, (1, 2), (1, 2), all_three), ((2, 3), all_three))
    job = job_operations(asked, workload(), How(variable_lengths=True, dealt=dealt))
    blocked = blocked_ranks(job)
    assert blocked
    assert "[sequences]" in describe(job, blocked)


@pytest.mark.parametrize("has_prices", [True, False])
def test_a_step_has_every_group_until_pipelines_are_full(has_prices: bool) -> None:
    asked = plan("tp1:2,tp1:2 @2 | tp1:2,tp1:2 @2 | tp1:4 @2")
    prices: Any = (object(),) * has_prices
    kinds = [
        GroupKind(3, (), {1: 1, 2: 1}),
        GroupKind(2, prices, {}),
        GroupKind(1, (), {}),
    ]
    tree = GroupTree(
        tuple(kinds), (TreeGroup(0, 3, 0, (1, 2)), TreeGroup(0, 2, 1, ()), TreeGroup(2, 3, 2, ()))
    )
    dealt = every_group_dealt(asked, tree)
    assert dealt == ((((0, 2),) * 4,) * 2 + (((2, 3),) * 4,) if has_prices else ())
