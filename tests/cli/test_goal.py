"""The length of a run, from the job's own flags."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from megatron_hetero.cli.goal import num_steps_of
from tests.cost.builders import make_workload

NOTHING_GIVEN = argparse.Namespace(steps=None, tokens=None)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (("--train-iters=10", "--lr", "1e-4", "--train-iters", "500"), 500),
        (("--train-samples", "64", "--train-samples=320"), 20),
        (("--lr", "1e-4"), None),
    ],
)
def test_of_several_values_the_last_counts(flags: tuple[str, ...], steps: float | None) -> None:
    workload = replace(make_workload(8, global_batch_size=16), megatron_args=flags)
    assert num_steps_of(NOTHING_GIVEN, workload) == steps
