"""What a rank says that it waits in, while several of its threads wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron_hetero.runtime.faults import unfinished
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs


def test_each_thread_has_its_own_messages(tmp_path: Path) -> None:
    """Two threads wait for a message each; the end of one wait leaves the other in the report."""

    def rank(number: int) -> None:
        import torch
        import torch.distributed as dist

        store = dist.FileStore(os.environ["MEGATRON_HETERO_STORE"], 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("first", "second")]
        if number == 0:
            for place, group in enumerate(groups):
                until((tmp_path / f"seen-{place}").exists)
                dist.send(torch.ones(1), 1, group)
            return

        def receive(group: Any) -> None:
            messages = [dist.P2POp(dist.irecv, torch.zeros(1), 0, group)]
            unfinished.wait_for(dist.batch_isend_irecv(messages), messages)

        threads = [Thread(target=receive, args=[group]) for group in groups]
        for thread in threads:
            thread.start()
        until(lambda: named() == {"first", "second"})
        (tmp_path / "seen-0").touch()
        threads[0].join()
        assert named() == {"second"}
        (tmp_path / "seen-1").touch()
        threads[1].join()
        assert named() == set()

    run_jobs([LocalJob("threads", 2, rank, tmp_path / "ranks")], timeout_s=60)


def test_a_wait_that_fails_is_over() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match="reset"):
        unfinished.wait_for([Broken()])
    assert unfinished._WAITED == {}


def named() -> set[str]:
    """Which of the groups stand in the report of messages."""
    lines = [line for line in unfinished.unfinished() if " a message " in line]
    return {name for name in ("first", "second") if any(f"({name})" in line for line in lines)}


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
