"""A communicator that cannot be made says which ranks it is of, and what to set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_hetero.runtime.parallel.connecting import connection_error


@pytest.fixture
def alone(tmp_path: Path) -> object:
    """A process group of this process, whose store others never reach."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_a_communicator_that_fails_says_which_ranks_and_what_to_set(alone: object) -> None:
    error = RuntimeError("NCCL error: unhandled system error\nmore")
    said = str(connection_error("tensor", range(12), error))
    assert "rank 0 cannot connect to the ranks of tensor (0 to 11): NCCL error" in said
    assert "more" not in said.partition("Let")[0]
    assert "NCCL_SOCKET_IFNAME" in said
