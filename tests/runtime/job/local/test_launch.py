"""Ranks as forked processes: their world, their logs, and ends that the parent passes on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_hetero.errors import (
    EXIT_RANK_DIED,
    EnvironmentMismatchError,
    InfeasiblePlanError,
    UsageError,
)
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.local.ranks import rank_environment


def run(folder: Path, *functions: Callable[[int], None], timeout_s: float = 60) -> None:
    """Jobs of two ranks, side by side."""
    run_jobs(
        [LocalJob(f"job {j}", 2, own, folder / str(j)) for j, own in enumerate(functions)],
        timeout_s,
    )


def test_each_job_has_a_world_of_its_own(tmp_path: Path) -> None:
    def tell(rank: int) -> None:
        print(*[os.environ[name] for name in rank_environment(rank, 1, "")], flush=True)

    polls: list[float] = []
    jobs = [LocalJob("a", 2, tell, tmp_path / "a"), LocalJob("b", 1, tell, tmp_path / "b")]
    run_jobs(jobs, 60, on_poll=lambda: polls.append(time.monotonic()))
    said = {job.name: [(job.directory / f"rank-{r}.log").read_text().split() for r in
                       range(job.num_ranks)] for job in jobs}  # fmt: skip
    assert [(words[0], words[2]) for words in said["a"]] == [("0", "2"), ("1", "2")]
    assert [(words[0], words[2]) for words in said["b"]] == [("0", "1")]
    stores = {job: {words[4] for words in own} for job, own in said.items()}
    assert len(stores["a"]) == len(stores["b"]) == 1 and stores["a"] != stores["b"]
    assert polls and "RANK" not in os.environ


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        (lambda: sys.exit(7), EXIT_RANK_DIED, r"status 7.*left by sys\.exit\(7\)"),
        (lambda: 1 / 0, EXIT_RANK_DIED, "status 1.*ZeroDivisionError: division by zero"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), EXIT_RANK_DIED, "signal 9 .*memory"),
        (lambda: _raise(UsageError("no such flag")), UsageError.exit_code, "error: no such flag"),
        (lambda: _raise(InfeasiblePlanError("too long")), InfeasiblePlanError.exit_code, "long"),
        (
            lambda: _raise(EnvironmentMismatchError("no GPU")),
            EnvironmentMismatchError.exit_code,
            "error: no GPU",
        ),
    ],
    ids=["exit", "error", "signal", "usage", "infeasible", "environment"],
)
def test_an_end_is_told_and_ends_the_others(
    end: Callable[[], object], status: int, says: str, tmp_path: Path
) -> None:
    """The exit code of a refusal is the run's; any other rank that waits for the first is ended."""

    def act(rank: int) -> None:
        print("before the end", flush=True)
        if rank == 1:
            end()
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RankFailedError, match=f"(?s)job 0: rank 1 of 2 ended with.*{says}") as told:
        run(tmp_path, act)
    assert told.value.exit_code == status
    assert "before the end" in str(told.value)
    assert time.monotonic() - began < 60


def _raise(error: Exception) -> None:
    raise error


def test_an_exit_in_good_order_is_none(tmp_path: Path) -> None:
    """As Megatron ends a run at --exit-interval."""
    run(tmp_path, lambda rank: sys.exit(), lambda rank: sys.exit(0))


def test_a_ctrl_c_while_ranks_start_ends_those_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    fork = os.fork

    def interrupted_fork() -> int:
        if pids:
            os.kill(os.getpid(), signal.SIGINT)
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", interrupted_fork)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, lambda rank: time.sleep(600))
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_job_that_does_not_end_is_ended(tmp_path: Path) -> None:
    def wait(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(tmp_path / f"pid-{rank}").write_text(str(os.getpid()))
        print("waiting", flush=True)
        time.sleep(600)

    with pytest.raises(
        RankFailedError, match=r"(?s)not finished after 1 s; rank \d last.*waiting"
    ) as told:
        run(tmp_path, wait, timeout_s=1)
    # Every rank says where it stands.
    stacks = str(told.value).split(" is at:")[1:]
    assert len(stacks) == 2 and all(
        "test_launch.py" in own and "wait" in own for own in stacks
    )
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


def test_a_job_that_hangs_names_the_communicators(tmp_path: Path) -> None:
    """One rank waits in a collective, one for a message of the first, which sleeps."""

    def hang(rank: int) -> None:
        import torch
        import torch.distributed as dist

        from megatron_hetero.runtime.faults.unfinished import wait_for

        store = dist.FileStore(os.environ["MEGATRON_HETERO_STORE"], 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        summed = dist.new_group([0, 1], group_desc="gradients")
        passed = dist.new_group([0, 2], group_desc="forward messages of boundary 0")
        if rank == 1:
            dist.all_reduce(torch.zeros(1), group=summed)
        if rank == 2:
            messages = [dist.P2POp(dist.irecv, torch.zeros(1), 0, passed)]
            wait_for(dist.batch_isend_irecv(messages), messages)
        time.sleep(600)

    with pytest.raises(RankFailedError, match="not finished") as told:
        run_jobs([LocalJob("hangs", 3, hang, tmp_path)], timeout_s=12)
    first, second, third = str(told.value).split(" is at:")[1:]
    assert "waits in" not in first
    assert re.search(r"waits in all_reduce, communicator \S+ of ranks 0, 1 \(gradients\)", second)
    assert "waits in a message from rank 0, communicator" in third
    assert "of ranks 0, 2 (forward messages of boundary 0)" in third
    assert "test_launch.py" in first and "test_launch.py" in third


def test_ranks_end_where_the_system_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes is met at the third fork; the two before must not stay."""
    fork, pids = os.fork, list[int]()

    def few() -> int:
        if len(pids) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        pid = fork()
        if pid:
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", few)
    job = LocalJob("the plan", 4, lambda rank: time.sleep(60), tmp_path)
    with pytest.raises(EnvironmentMismatchError, match=r"the plan: process 3 of 4 .*ulimit -u"):
        run_jobs([job], 60)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
