"""Launchers that `launch --for` knows; a new one is a file beside this one and a line here."""

from __future__ import annotations

from megatron_hetero.flags.launchers.kubernetes import KUBERNETES
from megatron_hetero.flags.launchers.launcher import Launcher
from megatron_hetero.flags.launchers.pbs import PBS
from megatron_hetero.flags.launchers.pytorchjob import PYTORCHJOB
from megatron_hetero.flags.launchers.skypilot import SKYPILOT
from megatron_hetero.flags.launchers.slurm import SLURM
from megatron_hetero.flags.launchers.ssh import SSH
from megatron_hetero.flags.launchers.torchrun import TORCHRUN

LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher
    for launcher in (TORCHRUN, SSH, SLURM, PBS, KUBERNETES, PYTORCHJOB, SKYPILOT)
}
