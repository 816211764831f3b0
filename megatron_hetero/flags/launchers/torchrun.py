"""torchrun by hand: the node script, and a page with the command of each machine."""

from __future__ import annotations

from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.launcher import Launcher
from megatron_hetero.flags.launchers.node_script import node_script


def torchrun_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return `train.sh` and the commands, one for each machine."""
    lines = [f"{host.host}: bash train.sh {rank}\n" for rank, host in enumerate(job.plan.hosts)]
    return (node_script(job), LaunchFile("START.txt", "".join(lines)))


TORCHRUN = Launcher("torchrun", torchrun_files, "run the lines of START.txt, each on its machine")
