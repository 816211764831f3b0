"""`megatron-hetero discover`: a first cluster.yaml from the GPUs of this machine, or of others."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.inventory.discovery import (
    asked_topology,
    check_whole,
    draft_node,
    find_gpus,
    topology_text,
)
from megatron_hetero.cluster.inventory.draft import NodeDraft
from megatron_hetero.cluster.inventory.measurements import parse_nccl_test
from megatron_hetero.cluster.inventory.nics import port_files, read_ports
from megatron_hetero.cluster.inventory.remote import discover_hosts, targets
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.cluster.inventory.topology import Topology, parse_topology
from megatron_hetero.errors import FileFormatError, UsageError
from megatron_hetero.files import read_text

DESCRIPTION = """\
Write a first cluster.yaml from the GPUs of this machine: their types, number and
memory as the driver says, and the links between them from `nvidia-smi topo -m`
or, better, from a log of nccl-tests.  What nobody measured is marked as a guess.
With --hosts the same is asked of other machines over ssh, which must not need a
password.

  megatron-hetero discover -o cluster.yaml
  megatron-hetero discover --nccl-tests all_reduce.log -o cluster.yaml
  nvidia-smi topo -m > topo.txt;  megatron-hetero discover --topology topo.txt
  megatron-hetero discover --hosts a100-0,admin@rtx-0.lab -o cluster.yaml
  megatron-hetero discover --hostfile hosts.txt -o cluster.yaml"""
TAKES_MEGATRON_FLAGS = False
_HEADING = "Written by megatron-hetero discover; look at what is a guess."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `discover`."""
    parser.add_argument(
        "--hosts", metavar="HOST,HOST",
        help="ask these machines over ssh (user@host is allowed), and not this one",
    )  # fmt: skip
    parser.add_argument(
        "--hostfile", type=Path, metavar="FILE",
        help="the same, one machine on each line; what follows its name does not count",
    )  # fmt: skip
    parser.add_argument(
        "--nccl-tests", type=Path, metavar="LOG",
        help="output of all_reduce_perf, sendrecv_perf, ... between this machine's GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--topology", type=Path, metavar="FILE",
        help="output of `nvidia-smi topo -m` (default: asked of this machine)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="CLUSTER.YAML", help="write it to a file"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Look, and write or print the file."""
    if arguments.hosts is not None or arguments.hostfile is not None:
        nodes, data, found = _over_ssh(arguments, output)
    else:
        nodes, data, found = _here(arguments)
    text = cluster_yaml(nodes, _HEADING)
    if arguments.output:
        write_new(arguments.output, text)
    if arguments.json:
        output.json({**data, "cluster": text})
    elif arguments.output:
        output.show(f"Written to {arguments.output}: {found}; {what_next(arguments.output, nodes)}")
    else:
        output.verbatim(text)
    return 0


def _here(
    arguments: argparse.Namespace,
) -> tuple[tuple[NodeDraft, ...], dict[str, Any], str]:
    """Return the machines, the findings as data, and the findings in a few words."""
    gpus = find_gpus()
    check_whole(gpus)
    measured = None
    topology: Topology | None = None
    if arguments.nccl_tests:
        test = parse_nccl_test(read_text(arguments.nccl_tests), str(arguments.nccl_tests))
        # The bandwidth of wrong values means nothing.
        if test.num_wrong:
            raise UsageError(
                f"{arguments.nccl_tests} counts {test.num_wrong} wrong values: this machine's GPUs "
                "do not exchange what they are sent. Mend that before anything else; "
                "NCCL_P2P_DISABLE=1 is the first thing to try."
            )
        if test.num_hosts > 1:
            raise UsageError(
                f"{arguments.nccl_tests} is of {test.num_hosts} machines, so it measures the "
                "network between them: give a log of this machine's GPUs alone"
            )
        measured = test.link()
    # From a file, or asked of this machine where it has GPUs to join.
    if arguments.topology:
        topology = parse_topology(read_text(arguments.topology), str(arguments.topology))
    elif len(gpus) > 1:
        topology = asked_topology(topology_text, "nvidia-smi topo -m", gpus)
    # Speeds of the NICs that the topology names.
    ports = "" if topology is None else read_ports(port_files(topology))
    node = draft_node(gpus, topology, measured, ports=ports)
    return (node,), {"gpus": [asdict(gpu) for gpu in gpus]}, f"{len(gpus)} GPUs"


def _over_ssh(
    arguments: argparse.Namespace, output: Output
) -> tuple[tuple[NodeDraft, ...], dict[str, Any], str]:
    """Return as `_here`, of other machines."""
    # A log and a topology belong to one machine.
    for name in ("nccl_tests", "topology"):
        if getattr(arguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is of one machine: leave it away, or run "
                "discover there"
            )
    machines = targets(arguments.hosts, arguments.hostfile)
    with output.progress(f"asking {len(machines)} hosts"):
        inventory, gpus = discover_hosts(machines)
    for note in inventory.notes:
        output.note(note)
    data = {"gpus": {host: [asdict(gpu) for gpu in found] for host, found in gpus.items()}}
    num_gpus = sum(node.count for node in inventory.nodes)
    return inventory.nodes, data, f"{len(inventory.nodes)} machines, {num_gpus} GPUs"


def unknown_types(nodes: Sequence[NodeDraft]) -> tuple[str, ...]:
    """Return GPUs that neither the catalogue nor anybody describes: the file has question marks."""
    cards = (cards for node in nodes for cards in node.cards)
    return tuple(dict.fromkeys(c.gpu for c in cards if c.described and not c.described.is_complete))


def what_next(path: Path, nodes: Sequence[NodeDraft]) -> str:
    """Say what a first cluster file still lacks, or give the next command."""
    if unknown := unknown_types(nodes):
        return f"fill in its question marks first: the catalogue has no {', '.join(unknown)}"
    return (
        f"next: correct what is marked as a guess, and megatron-hetero plan --cluster "
        f"{shlex.quote(str(path))} --model FILE, a Megatron script or a Hugging Face config.json"
    )


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        UsageError: it is; a cluster file is somebody's work.
        FileFormatError: it cannot be written there.
    """
    try:
        # Mode "x" fails on an existing file, without a gap between the look and the write.
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already; give another name, or remove it") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written: {error.strerror}") from None
