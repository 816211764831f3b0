"""The GPUs of machines that ssh reaches: the same questions to `nvidia-smi`, asked there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hetero.cluster.inventory.discovery import (
    FoundGpu,
    asked_topology,
    check_whole,
    draft_node,
    parse_gpus,
    query,
)
from megatron_hetero.cluster.inventory.draft import Inventory, NodeDraft
from megatron_hetero.cluster.inventory.nics import port_files
from megatron_hetero.cluster.inventory.topology import Topology
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.errors import EnvironmentMismatchError, HeteroError, UsageError
from megatron_hetero.files import read_text

CONNECT_S = 10
LIMIT_S = 60
_AT_ONCE = 16
_MAX_HOSTS = 8192
_MAX_ANSWER = 1 << 20
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", re.ASCII)


@dataclass(frozen=True)
class Answer:
    """What a host says of itself: the topology where it has several GPUs, and the ports of its NICs
    as `grep -H .` prints their files."""

    gpus: tuple[FoundGpu, ...]
    topology: Topology | None
    ports: str


@dataclass(frozen=True)
class Target:
    """Host, and the word given to ssh (`user@host`, or the host)."""

    word: str
    host: str


def targets(hosts: str | None, hostfile: Path | None) -> tuple[Target, ...]:
    """Read the machines of `a,user@b`, or of a file with a machine on each line (comments, and
    words behind the first such as `slots=8`, are ignored).

    Raises:
        UsageError: no machine, one twice, or a name that is none.
    """
    words = [] if hosts is None else [word.strip() for word in hosts.split(",")]
    if hostfile is not None:
        # A hostfile of MPI has words such as `slots=8` behind the host.
        lines = (line.partition("#")[0].split() for line in read_text(hostfile).splitlines())
        words += [line[0] for line in lines if line]
    if not words or len(words) > _MAX_HOSTS:
        raise UsageError(f"{len(words)} hosts are named; 1 to {_MAX_HOSTS} can be asked")
    found = tuple(map(_target, words))
    # Names of hosts do not tell capital letters from small ones.
    counts = Counter(target.host.casefold() for target in found)
    twice = next((host for host, count in counts.items() if count > 1), "")
    if twice:
        raise UsageError(f"the host {twice} is named twice; once is enough")
    return found


def _target(word: str) -> Target:
    user, at, host = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{word!r}: {user!r} is not a user's name")
    try:
        return Target(word, check_host_name(host))
    except ValueError as error:
        raise UsageError(f"{word!r}: {error}") from None


def discover_hosts(machines: Sequence[Target]) -> tuple[Inventory, dict[str, list[FoundGpu]]]:
    """Ask the hosts for GPUs over the system's ssh, some hosts at a time.

    ssh asks for no password and trusts no unknown host (BatchMode): what it needs stands in the
    user's own configuration.

    Returns:
        The nodes, and the GPUs found on each host.
    Raises:
        EnvironmentMismatchError: there is no ssh, or hosts do not answer; all of them are named.
    """
    if shutil.which("ssh") is None:
        raise EnvironmentMismatchError("there is no `ssh` on this machine to ask the hosts with")
    # Ask hosts side by side; nothing is written unless all answer.
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        answers = list(pool.map(_ask, machines))
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        raise EnvironmentMismatchError(
            f"{len(failed)} of {len(machines)} hosts did not answer, and nothing was written:\n  "
            + "\n  ".join(failed)
            + "\nMend them, or leave them out of the list."
        )
    nodes: list[NodeDraft] = []
    gpus: dict[str, list[FoundGpu]] = {}
    names: set[str] = set()
    # Name nodes by their hosts, each name once.
    for machine, answer in zip(machines, answers, strict=True):
        if isinstance(answer, str):
            continue
        gpus[machine.host] = list(answer.gpus)
        node = draft_node(answer.gpus, answer.topology, host="a-node", ports=answer.ports)
        nodes.append(replace(node, name=_node_name(machine.host, names), host=machine.host))
    return Inventory(tuple(nodes)), gpus


def _node_name(host: str, names: set[str]) -> str:
    """Make a node's name of a host's: its first part, an address as a whole; never one that another
    node has."""
    # An address has no first part that would name the machine.
    is_address = host.replace(".", "").isdecimal()
    short = host.replace(".", "-") if is_address else host.partition(".")[0]
    number, free = 1, short
    # `a.x` and `a.y` are two machines called `a`.
    while free.casefold() in names:
        number += 1
        free = f"{short}-{number}"
    names.add(free.casefold())
    return free


def _ask(machine: Target) -> Answer | str:
    """Ask a host for its GPUs, links and NICs; return the reason if there is no answer."""
    try:
        gpus = parse_gpus(_ssh(machine, query()))
        check_whole(gpus)
        # A single GPU has no links to others, and its NIC is the machine's.
        if len(gpus) == 1:
            return Answer(gpus, None, "")
        topology = asked_topology(
            lambda: _ssh(machine, ("nvidia-smi", "topo", "-m")),
            f"nvidia-smi topo -m on {machine.host}",
            gpus,
        )
        files = port_files(topology)
        # `-s` hides files that are missing, and grep then fails.
        ports = _ssh(machine, ("grep", "-sH", ".", *files), may_fail=True) if files else ""
        return Answer(gpus, topology, ports)
    except HeteroError as error:
        return f"{machine.host}: {error}"


def _ssh(machine: Target, command: Sequence[str], *, may_fail: bool = False) -> str:
    """Run a command on a host and return its output.  ssh hands the remote shell one text, so it is
    quoted for it.

    Args:
        command: in words.
        may_fail: what it printed counts however it ends (files of which some are missing).
    Raises:
        EnvironmentMismatchError: no connection, or the command fails.
    """
    # Options before `--`, so that no host name is taken for one.
    words = [
        "ssh",
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={CONNECT_S}"),
        "-T",
        "--",
        machine.word,
        # ssh joins words by blanks for the remote shell, so the words are quoted here.
        shlex.join(command),
    ]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentMismatchError(f"no answer within {LIMIT_S} s") from None
    except OSError as error:
        raise EnvironmentMismatchError(f"ssh cannot be started: {error.strerror}") from None
    # The answer of another machine is bounded, and may be no text.
    printed = done.stdout[:_MAX_ANSWER].decode(errors="replace")
    # ssh itself ends with 255 if the connection fails.
    is_lost = done.returncode == 255
    if is_lost or (done.returncode and not may_fail):
        # The last line is the reason, as a rule.  ssh's own words stand in stderr, its warnings of
        # a connection that holds too; nvidia-smi prints its errors to stdout.
        errors = done.stderr[-2000:].decode(errors="replace").strip()
        first, second = (errors, printed.strip()) if is_lost else (printed.strip(), errors)
        said = (first or second).splitlines()
        what = "ssh" if is_lost else f"{command[0]} there"
        last = _printable(said[-1][:200]) if said else "it said nothing"
        raise EnvironmentMismatchError(f"{what} ended with {done.returncode}: {last}")
    return printed


def _printable(text: str) -> str:
    """Replace what could steer a terminal: the text is another machine's."""
    return "".join(c if c.isprintable() else "?" for c in text)
