"""Dropout: which ranks of an asymmetric plan drop alike, which not, and how much.

A plan cannot be equal to one process number for number: masks depend on the layout, as they do in
Megatron.  Training with dropout has Megatron's bits where Megatron can run the plan
(`test_symmetric.py`), and resumes bit for bit (`test_random_states.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.workloads import plan, workload

HIDDEN, ATTENTION = 0.2, 0.1
LAYOUT = "tp3(2:1:1):3,tp1:1 @2 | tp1:4 @4"
GROUP, SECOND_STAGE = (0, 1, 2), 3
ALIKE = "tp1:4 @2 | tp1:4 @4"
Masks = list[numpy.ndarray]
"""What was kept, in the order in which it was drawn."""


def test_copies_drop_alike_and_shards_do_not(tmp_path: Path) -> None:
    hidden, attention = _masks(tmp_path, [])
    for other in GROUP[1:]:
        assert _are_equal(hidden[0], hidden[other])
    # [batch, heads, queries, keys]: unlike shares have unlike numbers of heads.
    least = min(attention[rank][0].shape[1] for rank in GROUP)
    assert {attention[rank][0].shape[1] for rank in GROUP} == {least, 2 * least}
    for one, other in combinations(GROUP, 2):
        pairs = zip(attention[one], attention[other], strict=True)
        assert _are_independent([(a[:, :least], b[:, :least]) for a, b in pairs], ATTENTION)
    assert _are_independent(zip(hidden[0], hidden[SECOND_STAGE], strict=False), HIDDEN)
    for rank in range(5):
        assert _drop_rate_is(hidden[rank], HIDDEN)
        assert _drop_rate_is(attention[rank], ATTENTION)


def test_parts_of_a_sequence_do_not_drop_alike(tmp_path: Path) -> None:
    hidden, _ = _masks(tmp_path, ["--sequence-parallel"])
    for one, other in combinations(GROUP, 2):
        assert hidden[one][0].shape == hidden[other][0].shape
        assert _are_independent(zip(hidden[one], hidden[other], strict=True), HIDDEN)


def test_replicas_draw_apart_on_demand(tmp_path: Path) -> None:
    """Megatron's replicas draw from one seed, each for samples of its own."""
    for name, flags in (("alike", []), ("apart", ["--data-parallel-random-init"])):
        hidden, attention = _masks(tmp_path / name, flags, ALIKE)
        assert len(hidden[1]) == 2 * len(hidden[0])
        half = len(hidden[0])
        assert _are_equal(hidden[0], hidden[1][:half]) is (name == "alike")
        independent = _are_independent(zip(hidden[0], hidden[1], strict=False), HIDDEN)
        assert independent is (name == "apart")
        pairs = zip(attention[0], attention[1], strict=False)
        assert _are_independent(pairs, ATTENTION) is (name == "apart")


def _masks(
    folder: Path, flags: Sequence[str], layout: str = LAYOUT
) -> tuple[list[Masks], list[Masks]]:
    """([rank] -> of activations, [rank] -> of attention scores) in the first step of training."""
    num_ranks = plan(layout).layout.num_devices
    shrunk = shrink(plan(layout), workload(sequence_parallel="--sequence-parallel" in flags))
    jobs = VerifyJobs(shrunk, Options(steps=1), folder)
    run_jobs([jobs.seed_job()], 120)
    argv = [
        *jobs.training_arguments("sgd"),
        *flags,
        f"--hidden-dropout={HIDDEN}",
        f"--attention-dropout={ATTENTION}",
        f"--hetero-layout={layout}",
        f"--data-cache-path={folder / 'cache'}",
    ]

    def train(rank: int) -> None:
        drawn: dict[float, Masks] = {HIDDEN: [], ATTENTION: []}

        def recorded(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            # Draws as dropout of x does; zeros of x itself cannot be told from what it drops.
            kept = torch.dropout(torch.ones_like(x), p, training)
            # Megatron warms its kernels up with activations and a rate of 0.1.
            if (p, x.dim()) in ((HIDDEN, 3), (ATTENTION, 4)):
                drawn[p].append((kept != 0).numpy())
            return x * kept

        torch.nn.functional.dropout = recorded  # type: ignore[assignment]
        entry.main(argv)
        for p, masks in drawn.items():
            named = {f"{number:03}": mask for number, mask in enumerate(masks)}
            numpy.savez(folder / f"masks-{rank}-{p}.npz", **named)

    run_jobs([LocalJob("dropout", num_ranks, train, folder / "run")], 120)

    def read(p: float) -> list[Masks]:
        found = []
        for rank in range(num_ranks):
            with numpy.load(folder / f"masks-{rank}-{p}.npz", allow_pickle=False) as archive:
                found.append([archive[name] for name in sorted(archive.files)])
        return found

    return read(HIDDEN), read(ATTENTION)


def _are_equal(one: Masks, other: Masks) -> bool:
    return len(one) == len(other) > 0 and all(map(numpy.array_equal, one, other))


def _are_independent(pairs: Any, p: float) -> bool:
    """Tell if masks agree as often as two draws do, within five standard deviations."""
    agree = numpy.concatenate([(a == b).ravel() for a, b in pairs])
    expected = p * p + (1 - p) * (1 - p)
    return _is_near(float(agree.mean()), expected, agree.size)


def _drop_rate_is(masks: Masks, p: float) -> bool:
    return _is_near(float(numpy.mean([m.mean() for m in masks])), 1 - p, sum(m.size for m in masks))


def _is_near(found: float, expected: float, num_draws: int) -> bool:
    assert num_draws > 10_000
    return bool(abs(found - expected) < 5 * numpy.sqrt(expected * (1 - expected) / num_draws))


@pytest.mark.parametrize("p", [HIDDEN, ATTENTION])
def test_the_measure_tells_equal_from_independent(p: float) -> None:
    generator = numpy.random.default_rng(0)
    one, other = (generator.random(20_000) > p for _ in range(2))
    assert _are_independent([(one, other)], p)
    assert not _are_independent([(one, one)], p)
    assert not _drop_rate_is([one], p + 0.02)
