"""The start of a job names who does not come, and what cannot be connected."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.runtime.parallel.connecting import connection_error, meet


@pytest.fixture
def alone(tmp_path: Path) -> object:
    """A process group of this process, whose store others never reach."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_ranks_that_do_not_come_are_named(
    alone: object, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["stage 0", "stage 1, a:1", "stage 2, b:0"]
    with pytest.raises(EnvironmentMismatchError, match=r"rank 1 \(stage 1, a:1\), rank 2 .* 1 s"):
        meet(names, timedelta(seconds=1), patience_s=0.3)
    assert "waiting for rank 1 (stage 1, a:1), rank 2 (stage 2, b:0)" in capsys.readouterr().out


def test_all_that_come_go_on(alone: object) -> None:
    meet(["stage 0"], timedelta(seconds=1))


def test_a_communicator_that_fails_says_which_ranks_and_what_to_set(alone: object) -> None:
    error = RuntimeError("NCCL error: unhandled system error\nmore")
    said = str(connection_error("tensor", range(12), error))
    assert "rank 0 cannot connect to the ranks of tensor (0 to 11): NCCL error" in said
    assert "more" not in said.partition("Let")[0]
    assert "NCCL_SOCKET_IFNAME" in said
