"""`--tp-comm-overlap`: each tensor-parallel group has its own buffers, whatever the width.

Transformer Engine's `initialize_ub` runs in real processes; only its compiled classes, which need
GPUs, are replaced by such that say what they were given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError
from megatron_hetero.runtime.megatron import tensor_overlap

ROOT = Path(__file__).parents[3]
NAMES = 12
"""Products under which tensors are exchanged by default: each has a buffer."""


def run(groups: list[list[int]], size: int, folder: Path) -> list[list[object]]:
    words = [sys.executable, "-m", "tests.runtime.megatron.overlap_ranks"]
    done = subprocess.run(
        [*words, str(size), str(folder), json.dumps(groups)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_groups_of_unlike_width_are_each_a_job_of_their_own(tmp_path: Path) -> None:
    """Widths 3, 1 and 2, the second group with micro-batches of two sequences."""
    found = run([[0, 1, 2], [4, 5]], 6, tmp_path)
    for rank, own, width, tokens in (
        *((r, [0, 1, 2], 3, 64) for r in (0, 1, 2)),
        *((r, [4, 5], 2, 128) for r in (4, 5)),
    ):
        helper, *buffers = found[rank]
        assert helper == [own, own]
        assert len(buffers) == NAMES
        assert all(b == [[tokens, 32], "torch.bfloat16", width] for b in buffers), buffers
    assert found[3] == []


def test_a_group_in_another_order_than_its_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 2)
    tensor_overlap._check_device(2, 4)
    tensor_overlap._check_device(0, 2)
    with pytest.raises(EnvironmentMismatchError, match="ascending order"):
        tensor_overlap._check_device(1, 4)


def test_other_ways_of_making_groups_are_refused_and_torch_is_left_as_it_was() -> None:
    before = dist.new_group, dist.new_subgroups_by_enumeration
    for name, given in (
        ("new_group", {"backend": "mpi"}),
        ("new_subgroups_by_enumeration", {"ranks_per_subgroup_list": [[0]]}),
    ):
        shown = tensor_overlap._shown_alone(None, "gloo")  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="Leave the flag out"), shown:
            getattr(dist, name)(**given)
    assert (dist.new_group, dist.new_subgroups_by_enumeration) == before
