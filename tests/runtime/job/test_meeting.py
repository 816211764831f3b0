"""Ranks that differ start together or not at all, and all say what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hetero.errors import EXIT_RANK_DIED
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.ranks import rank_environment
from tests.runtime.planted import NUM_RANKS, Difference, PlantedJob, fault_of, kinds
from tests.runtime.started import Start, start_ranks


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> PlantedJob:
    return PlantedJob(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def alone(job: PlantedJob) -> Start:
    found = job.start()
    assert found.codes == (0,) * NUM_RANKS and len(found.losses) == 2
    return found


@pytest.mark.parametrize("kind", sorted(kinds(0, 2)))
def test_one_difference_of_each_kind(kind: str, job: PlantedJob, alone: Start) -> None:
    place = sorted(kinds(0, 2)).index(kind)
    choices = kinds(place % NUM_RANKS, 3)[kind]
    difference = choices[place % len(choices)]
    assert fault_of(job.start(difference), difference, alone) is None


def test_the_message_says_who_has_what(job: PlantedJob) -> None:
    found = job.start(Difference("", 1, "--lr", ("--lr=0.5",)))
    assert found.codes == (2, 2, 2)
    for log in found.logs:
        assert "--lr: rank 1 on " in log and ": 0.5; ranks 0, 2: 0.0" in log


def test_a_rank_that_dies_on_its_way_ends_all(job: PlantedJob, tmp_path: Path) -> None:
    """It was there, and is killed before the ranks meet."""

    def train(rank: int) -> None:
        more = ["--hetero-drill=kill@1:0:start"] if rank == 1 else []
        entry.main([*job.argv(None, rank), *more])

    found = start_ranks(NUM_RANKS, tmp_path, train)
    assert found.codes == (EXIT_RANK_DIED, -9, EXIT_RANK_DIED)
    assert all("rank 1 on" in found.logs[r] and "died before" in found.logs[r] for r in (0, 2))


def test_ranks_that_meet_over_tcp(tmp_path: Path, alone: Start) -> None:
    """Rank 0 serves the store, and ends with it."""
    job = PlantedJob(tmp_path, over_tcp=True)
    found = job.start()
    assert found.codes == (0,) * NUM_RANKS and found.losses == alone.losses
    for difference in (
        Difference("", 0, "--lr", ("--lr=0.5",)),
        Difference("", 2, "--lr", ("--lr=0.5",)),
        kinds(0, 2)["half-written plan"][0],
    ):
        assert fault_of(job.start(difference), difference, alone) is None


@pytest.mark.slow
def test_seeds_of_hashes_are_harmless(job: PlantedJob, alone: Start, tmp_path: Path) -> None:
    """Every process of Python has its own order of sets of strings; no result may follow it."""
    ranks = []
    for rank in range(NUM_RANKS):
        place = rank_environment(rank, NUM_RANKS, str(tmp_path / "store"))
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "megatron_hetero.pretrain_gpt", *job.argv(None, rank)],
                env={
                    **os.environ,
                    **place,
                    "PYTHONHASHSEED": str(rank + 1),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    logs = tuple(rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS, logs
    assert Start((0,) * NUM_RANKS, logs, 0.0, 0.0).losses == alone.losses
