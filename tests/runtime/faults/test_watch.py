"""The watch, with real processes and a store of theirs: who is named, how soon, and who is not."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_hetero.errors import EXIT_RANK_DIED, CheckpointError
from megatron_hetero.lab.rehearse.pace import RehearsalDone
from megatron_hetero.runtime.faults import unfinished
from megatron_hetero.runtime.faults.beat import Beat
from megatron_hetero.runtime.faults.limits import StallLimits
from megatron_hetero.runtime.faults.others import OtherRanks
from megatron_hetero.runtime.faults.place import Place
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.faults.running import explained, start_watch
from megatron_hetero.runtime.faults.store import side_store
from megatron_hetero.runtime.faults.watch import Watch
from megatron_hetero.runtime.job.stock import ended
from megatron_hetero.runtime.state.saving import Saver
from tests.runtime.killed_jobs import kill_one
from tests.runtime.started import start_ranks

NUM_RANKS = 3
FLOOR_S = 5.0


@dataclass
class Watched:
    """Processes under watch: how each ended, what it said, and how long the others went on."""

    codes: list[int]
    said: list[str]
    seconds: float


def watched(folder: Path, broken: Callable[[], None] | None, work_s: float = 60.0) -> Watched:
    """Let processes make steps of 20 ms, of which rank 1 calls `broken` after a while."""
    began = time.monotonic() + 1.5
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, folder, broken, work_s)
        pids.append(pid)
    codes = []
    for rank in (0, 2):
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]))
    seconds = time.monotonic() - began
    if broken is not None:
        os.kill(pids[1], signal.SIGKILL)
    codes.insert(1, os.waitstatus_to_exitcode(os.waitpid(pids[1], 0)[1]))
    said = [(folder / f"rank-{rank}").read_text() for rank in range(NUM_RANKS)]
    return Watched(codes, said, seconds)


def _be_rank(rank: int, folder: Path, broken: Callable[[], None] | None, work_s: float) -> None:
    log = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    code = 1
    try:
        place = Place.here(rank, f"A100 a-0:{rank}, replica 0, stage {rank}, tensor rank 0")
        store = side_store("watch", str(folder / "store"), rank, NUM_RANKS)
        assert store is not None
        watch = Watch(store, place, NUM_RANKS, StallLimits(FLOOR_S))
        PROGRESS.enter(Phase.SETUP)  # whatever a test before this one left
        watch.start()
        step, start = 0, time.monotonic()
        while time.monotonic() - start < work_s:
            step += 1
            PROGRESS.begin_step(step, Phase.WARM_UP)
            time.sleep(0.02)
            PROGRESS.enter(Phase.STEADY)
            if rank == 1 and broken is not None and time.monotonic() - start > 1.5:
                broken()
        watch.stop()
        code = 0
    finally:
        os._exit(code)


def spin() -> None:
    """A training thread that runs and gets nowhere, though the watch beside it is well."""
    while True:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("broken", "what", "at_most_s"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "is dead", 5.0),
        (spin, r"stands still, at test_watch.py:\d+ \(spin\)", FLOOR_S + 5.0),
    ],
    ids=["killed", "spinning"],
)
def test_a_fault_is_found_in_time_and_named(
    broken: Callable[[], None], what: str, at_most_s: float, tmp_path: Path
) -> None:
    found = watched(tmp_path, broken)
    assert found.codes[0] == found.codes[2] == EXIT_RANK_DIED
    assert found.seconds < at_most_s
    line = re.compile(
        rf"error: rank 1 on \S+ \(A100 a-0:1, replica 0, stage 1, tensor rank 0\) {what}\. "
        r"It was last in step \d+, phase (steady|warm-up), .* All ranks stop\."
    )
    assert line.search(found.said[0]) and line.search(found.said[2])


@pytest.mark.slow
def test_a_stopped_process_is_found_in_a_minute(tmp_path: Path) -> None:
    found = watched(tmp_path, lambda: os.kill(os.getpid(), signal.SIGSTOP), work_s=90.0)
    assert found.codes[0] == found.codes[2] == EXIT_RANK_DIED
    assert found.seconds < 60.0
    assert "rank 1 on" in found.said[0] and "is frozen" in found.said[0]


def test_an_announced_pause_and_an_end_are_no_faults(tmp_path: Path) -> None:
    """Rank 1 rests for longer than the limit, again and again, while the others go on and end."""

    def rest() -> None:
        with PROGRESS.pause():
            time.sleep(FLOOR_S + 3.0)

    found = watched(tmp_path, rest, work_s=10.0)
    assert [found.codes[0], found.codes[2]] == [0, 0], found.said
    assert found.said[0] == found.said[2] == ""


def test_an_exit_in_good_order_is_no_fault_to_those_who_stay(tmp_path: Path) -> None:
    """Rank 0 leaves its training as a rehearsal does, while rank 1 goes on for some seconds."""
    saver = Saver(None, None)

    def leave() -> None:
        raise RehearsalDone

    pids = []
    for rank, train in enumerate([leave, lambda: time.sleep(4.0)]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                start_watch(rank, 2, str(tmp_path / "store"), "a place", FLOOR_S)
                with suppress(RehearsalDone):
                    ended(saver, train)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]


def test_limits_are_learned_but_not_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROGRESS, "_listeners", [])
    limits = StallLimits(40.0)
    PROGRESS.listen(limits.learn)
    clock = iter([0.0, 100.0, 101.0, 131.0, 132.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    PROGRESS.begin_step(7, Phase.WARM_UP)
    PROGRESS.enter(Phase.STEADY)
    assert limits.of(Phase.STEADY, 7) == 1800.0
    PROGRESS.begin_step(8, Phase.WARM_UP)
    PROGRESS.enter(Phase.STEADY)
    PROGRESS.enter(Phase.COOL_DOWN)
    assert limits.of(Phase.WARM_UP, 8) == 150.0
    assert limits.of(Phase.STEADY, 8) == 40.0
    assert limits.of(Phase.SAVE_DATA, 8) == 1800.0


def test_a_process_that_waits_to_be_collected_is_dead() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    here = Place.here(0, "")
    assert here.is_alive() and Place.of(here.text()) == here
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert not Place(1, here.host, here.machine, "", pid, state[19]).is_alive()
    os.waitpid(pid, 0)
    assert not Place(1, here.host, here.machine, "", pid, state[19]).is_alive()


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_that_ends_while_it_is_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Its beat is read, it says that it is done, its process ends, and only then is that seen."""
    store = side_store("watch", str(tmp_path / "store"), 0, 2)
    assert store is not None
    others = OtherRanks(store, Place.here(0, ""), 2, StallLimits(FLOOR_S))
    here = Place.here(1, "")
    others.places = [here, here]
    store.set("beat/1", Beat(7, 3, Phase.STEADY, 0.0, False, "-").text())

    def is_alive(_place: Place) -> bool:
        if ended:
            store.set("beat/1", Beat(8, 3, Phase.END, 0.0, False, "-").text())
        return False

    monkeypatch.setattr(Place, "is_alive", is_alive)
    assert others.fault_of(1) == (None if ended else "is dead")


@pytest.mark.parametrize(
    ("phase", "over_tcp"),
    [
        (Phase.SETUP, False),
        (Phase.SETUP, True),
        (Phase.GRADIENT_SYNC, False),
        (Phase.SAVE_DATA, True),
    ],
)
def test_survivors_of_a_real_job_all_name_the_killed_rank(
    phase: Phase, over_tcp: bool, tmp_path: Path
) -> None:
    """Connections break before any watch has looked; none names another, or nobody."""
    found = kill_one(tmp_path, phase, 0, over_tcp=over_tcp)
    assert set(found.codes) == {EXIT_RANK_DIED}
    assert found.num_right == len(found.codes) and found.seconds < 5.0


@pytest.mark.parametrize("has_met", [True, False])
def test_the_end_of_the_store_while_the_watches_meet_names_rank_0(
    tmp_path: Path, has_met: bool
) -> None:
    """Rank 0 serves the store and dies, before rank 1 has read the places of all."""

    def meet(rank: int) -> None:
        store = side_store("watch", None, rank, 3)
        assert store is not None
        if rank == 0:
            if has_met:
                store.set("place/0", Place.here(0, "a place").text())
            store.get("place/1")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            start_watch(1, 3, None, "a place", FLOOR_S)

    found = start_ranks(3, tmp_path, meet, over_tcp=True)
    assert found.codes == (-signal.SIGKILL, EXIT_RANK_DIED, 0)
    (line,) = re.findall(r"^error: (.*)$", found.logs[1], re.MULTILINE)
    assert line.startswith("rank 0 on ")
    assert ("is dead" if has_met else "is gone, with the ranks' store") in line


def test_an_error_of_ones_own_is_told_to_all(tmp_path: Path) -> None:
    """A rank that fails is named with its error, and not as one that died."""

    def fail(rank: int) -> None:
        PROGRESS.enter(Phase.SETUP)
        start_watch(rank, 3, str(tmp_path / "store"), "a place", FLOOR_S)
        with explained():
            if rank == 1:
                raise ValueError("a shape of 3")
            time.sleep(8.0)

    found = start_ranks(3, tmp_path, fail)
    assert found.codes == (EXIT_RANK_DIED, 1, EXIT_RANK_DIED)
    for rank in (0, 2):
        assert (
            "rank 1 on" in found.logs[rank]
            and "failed with ValueError: a shape of 3" in (found.logs[rank])
        )
    assert "Traceback" in found.logs[1]


def test_the_same_refusal_of_all_keeps_its_status(tmp_path: Path) -> None:
    """Ranks that refuse alike do not take one another for dead, although one is slow."""

    def refuse(rank: int) -> None:
        PROGRESS.enter(Phase.SETUP)
        start_watch(rank, 3, str(tmp_path / "store"), "a place", FLOOR_S)
        with explained():
            time.sleep(rank * 1.2)
            raise CheckpointError("no checkpoint")

    assert start_ranks(3, tmp_path, refuse).codes == (4, 4, 4)


def test_connections_that_break_though_all_live_accuse_nobody_of_death(tmp_path: Path) -> None:
    def lose(rank: int) -> None:
        PROGRESS.enter(Phase.SETUP)
        start_watch(rank, 2, str(tmp_path / "store"), "a place", FLOOR_S)
        with explained():
            if rank == 0:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
            time.sleep(12.0)

    found = start_ranks(2, tmp_path, lose)
    assert found.codes == (EXIT_RANK_DIED, EXIT_RANK_DIED)
    assert all("lost its connection to others, though no rank died" in log for log in found.logs)


def test_a_report_on_a_signal_outlives_the_start_and_the_end_of_a_watch(tmp_path: Path) -> None:
    """A process has one pipe for signals, which the watch and the report share."""

    def ask(rank: int) -> None:
        unfinished.unfinished = lambda: ["waits in a test"]
        unfinished.report_on_signal(signal.SIGUSR1)
        store = side_store("watch", str(tmp_path / "store"), rank, 1)
        assert store is not None
        watch = Watch(store, Place.here(rank, "a place"), 1, StallLimits(FLOOR_S))
        PROGRESS.enter(Phase.SETUP)
        watch.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
        watch.stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)

    found = start_ranks(1, tmp_path, ask)
    assert found.logs[0].count("waits in a test") == 2
