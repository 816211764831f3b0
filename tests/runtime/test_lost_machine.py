"""A machine of a job is lost: what `launch --hetero-on-loss replan` wrote goes on without it.

Machines are addresses of the loopback interface: an `ssh` of the test starts what it is given as
processes of its own, and answers no more where a machine is lost.  All the rest is what users have.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.fault_runs import ASYMMETRIC, INTERVAL, FaultJob

STEPS, LOST_AFTER = 10, 5
ROOT = Path(__file__).parents[2]
BETWEEN_S = 60.0
"""From the last good step to the start of the processes of the next plan, at most."""

SSH = """\
#!/usr/bin/env bash
# ssh [-tt] [-o OPTION]... HOST COMMAND on an emulated machine
alive=
while [ "${1#-}" != "$1" ]; do
    [ "$1" = -o ] && shift
    case "$1" in ServerAliveInterval=*) alive=yes ;; esac
    shift
done
host=$1 command=$2
if [ -e "$MACHINES/$host.lost" ]; then
    exit 255
fi
setsid bash -c "$command" &
child=$!
trap 'kill -HUP -- -"$child" 2>/dev/null; exit 143' TERM
[ "$command" = true ] || echo "$child" >>"$MACHINES/$host.pids"
wait "$child"
code=$?
while [ -e "$MACHINES/$host.lost" ]; do  # nobody tells ssh that the other end is gone
    sleep 0.2
    [ -z "$alive" ] || { sleep 10; exit 255; }  # but its own questions, here sooner than usual
done
exit "$code"
"""
# So slow that four cards are worth their messages, and unlike, so that no plan of theirs is even.
CLUSTER = """\
version: 1
gpu_types:
  FAST: {memory: 24 GB, memory_bandwidth: 9 GB/s, bf16: 200 MFLOPS, fp16: 200 MFLOPS,
         fp32: 200 MFLOPS, compute_capability: "8.0"}
  SLOW: {memory: 24 GB, memory_bandwidth: 9 GB/s, bf16: 100 MFLOPS, fp16: 100 MFLOPS,
         fp32: 100 MFLOPS, compute_capability: "8.0"}
nodes:
  - {name: a, gpu: FAST, count: 2, host: 127.0.0.2}
  - {name: b, gpu: SLOW, count: 1, host: 127.0.0.3}
  - {name: c, gpu: SLOW, count: 1, host: 127.0.0.4}
links:
  inside_node: {FAST: {bandwidth: 20 GB/s, latency: 5 us}}
  between_nodes: {bandwidth: 10 Gb/s, latency: 30 us}
limits: {as_given: [precision]}
"""


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it started, whatever sessions they are in."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from descendants(int(child))


@dataclass
class Emulated:
    """Machines whose ssh is ours."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "ssh").write_text(SSH)
        (bin_folder / "ssh").chmod(0o755)
        path = os.pathsep.join(map(str, (bin_folder, Path(sys.executable).parent)))
        self.environment = {
            **os.environ,
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MACHINES": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }

    def lose(self, host: str) -> None:
        """End all processes of a machine at once, and let it answer no more."""
        (self.folder / f"{host}.lost").touch()
        starter = int((self.folder / f"{host}.pids").read_text().split()[-1])
        for pid in list(descendants(starter)):
            os.kill(pid, signal.SIGKILL)


def losses(text: str) -> dict[int, float]:
    """Step -> the loss in the log."""
    found = re.findall(r"iteration +(\d+)/.*lm loss: (\S+) ", text)
    return {int(step): float(loss) for step, loss in found}


def logged(folder: Path) -> dict[int, float]:
    """The losses in the logs of a start."""
    return losses("".join(p.read_text(errors="replace") for p in folder.glob("node-*.log")))


def one_process(argv: Sequence[str], folder: Path) -> dict[int, float]:
    """The losses of stock Megatron in one process, with weights by global index."""

    def train(_rank: int) -> None:
        backend.activate_cpu_backend()
        world = entry.World.from_environment()
        entry.train_stock([*argv, *backend.CPU_FLAGS], world, init="layout-independent")

    run_jobs([LocalJob("one process", 1, train, folder)], 120)
    return losses((folder / "rank-0.log").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", ["b", "a"], ids=["a machine", "the first machine"])
def test_a_job_goes_on_without_a_lost_machine(lost: str, tmp_path: Path) -> None:
    """Of three machines with four ranks; twice, since the first one holds the rendezvous."""
    flags = [
        flag
        for flag in FaultJob(ASYMMETRIC, tmp_path / "job").arguments()
        if not flag.startswith(("--hetero", "--save", "--load", "--split", "--eval"))
    ]
    # So that widths 1 and 2 pad the vocabulary to the same size.
    flags = [flag for flag in flags if not flag.startswith("--make-vocab")]
    flags += ["--make-vocab-size-divisible-by=3", "--global-batch-size=6"]
    flags += [f"--train-iters={STEPS}", "--split=1,0,0", "--eval-iters=0", "--eval-interval=100"]
    expected = one_process(flags, tmp_path / "one")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    plan, job = tmp_path / "plan.json", tmp_path / "on-machines"
    words = ["plan", "--cluster", str(tmp_path / "cluster.yaml"), "-o", str(plan), "--", *flags]
    assert main(words) == 0
    machines = {host["node"]: host["host"] for host in json.loads(plan.read_text())["hosts"]}
    assert set(machines) == {"a", "b", "c"}, "the plan has to use all machines"
    saving = (f"--save={tmp_path / 'saved'}", f"--load={tmp_path / 'saved'}")
    words = ["launch", str(plan), "--for", "ssh", "-o", str(job), "--hetero-on-loss", "replan"]
    words += ["--cluster", str(tmp_path / "cluster.yaml"), "--interface", "lo"]
    assert main([*words, "--", *saving, f"--save-interval={INTERVAL}"]) == 0

    emulated = Emulated(tmp_path / "machines")
    with (tmp_path / "start.log").open("w") as log:
        start = subprocess.Popen(
            ["bash", str(job / "start.sh")], env=emulated.environment, stdout=log, stderr=log
        )
    before: dict[int, float] = {}
    last_s = lost_s = planned_s = first_s = 0.0
    try:
        while start.poll() is None and not first_s:
            now = time.monotonic()
            text = (tmp_path / "start.log").read_text()
            if "planning for the others" not in text:
                seen = logged(job / "logs")
                if len(seen) > len(before):
                    before, last_s = seen, now
                if not lost_s and max(seen, default=0) >= LOST_AFTER:
                    lost_s = now
                    emulated.lose(machines[lost])
            elif not planned_s and (job / "logs").is_dir() and list(job.glob("logs-*")):
                planned_s = now
            elif planned_s and logged(job / "logs"):
                first_s = now
            time.sleep(0.05)
        code = start.wait(timeout=200)
    finally:
        start.terminate()
    shown = (tmp_path / "start.log").read_text()
    logs = "".join(p.read_text() for p in sorted((job / "logs").glob("*.log")))
    assert code == 0, shown + logs[-3000:]
    after = logged(job / "logs")
    print(
        f"{lost} lost: last good step {max(before)}, first new one {min(after)}; "
        f"{first_s - last_s:.1f} s between them: {planned_s - last_s:.1f} s until processes were "
        f"started again, {first_s - planned_s:.1f} s for their start"
    )
    assert f"lost: {lost}; planning for the others" in shown
    assert planned_s - last_s < BETWEEN_S
    assert lost not in (
        host["node"] for host in json.loads((job / "plan.json").read_text())["hosts"]
    )
    assert list(job.glob("plan-before-*.json"))
    # No step is left out, and none is trained that the last checkpoint had.
    assert min(after) - 1 >= max(before) - INTERVAL and (min(after) - 1) % INTERVAL == 0
    assert sorted({*before, *after}) == list(range(1, STEPS + 1))
    first = min(after)
    for step, loss in expected.items():
        assert step not in before or same(before[step], loss), step
        # The second line of a life has the mean of its first two steps, as Megatron prints it.
        mean = (loss + expected[first]) / 2 if step == first + 1 else loss
        assert step not in after or same(after[step], mean), step


def same(one: float, other: float) -> bool:
    """Whether two losses are equal to the rounding of fp32 and of the log."""
    return one == pytest.approx(other, rel=2e-6)
