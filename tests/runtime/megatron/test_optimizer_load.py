"""Jobs of stock's divided optimizer go on where they were, with torch's Adam."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hetero.runtime.megatron.optimizer_load import fill_states
from megatron_hetero.runtime.state import folders
from tests.runtime.fault_runs import LAST, SYMMETRIC, FaultJob
from tests.runtime.runs import checkpoint_tensors

_PADDED = "optimizer.distributed"
"""Tensors of stock's own format: buckets, with padding between parameters."""


@pytest.mark.parametrize(
    "more",
    [
        (),
        # What fills the states is the same in both forms; in this one the killed jobs of
        # `test_faults` go on to the same bits.
        pytest.param(("--dist-ckpt-optim-fully-reshardable",), marks=pytest.mark.slow),
    ],
)
def test_a_job_of_stock_goes_on_to_the_bit(more: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("--use-distributed-optimizer", *more)
    whole, parted = (FaultJob(SYMMETRIC, tmp_path / name) for name in ("whole", "parted"))
    whole.run(*flags)
    parted.run(*flags, "--exit-interval=4")
    parted.run(*flags)
    one, other = (
        checkpoint_tensors(folders.step_folder(job.checkpoints, LAST)) for job in (whole, parted)
    )
    assert one.keys() == other.keys()
    compared = [key for key in one if not key.startswith(_PADDED)]
    assert compared
    assert all(torch.equal(one[key], other[key]) for key in compared)


def test_states_are_those_before_the_first_step() -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    filled, fresh = (torch.optim.Adam([weight], lr=0.1) for weight in weights)
    fill_states(filled, ("exp_avg", "exp_avg_sq"))
    for optimizer, weight in ((filled, weights[0]), (fresh, weights[1])):
        weight.grad = torch.tensor([1.0, -2.0, 0.5])
        optimizer.step()
        fill_states(optimizer, ("exp_avg", "exp_avg_sq"))  # it has taken a step: nothing changes
    assert torch.equal(*weights)
    assert filled.state[weights[0]]["step"] == fresh.state[weights[1]]["step"] == 1
