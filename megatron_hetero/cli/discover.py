"""`megatron-hetero discover`: a first cluster.yaml from the GPUs of this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.discovery import (
    cluster_yaml,
    draft_nodes,
    find_gpus,
    topology_text,
)
from megatron_hetero.cluster.measurements import parse_nccl_test, parse_topology
from megatron_hetero.errors import UsageError
from megatron_hetero.files import read_text

DESCRIPTION = """\
Write a first cluster.yaml from the GPUs of this machine: their types, number and
memory as the driver says, and the links between them from `nvidia-smi topo -m`
or, better, from a log of nccl-tests.  What nobody measured is marked as a guess.
Run it on each machine and put the nodes into one file.

  megatron-hetero discover --nccl-tests all_reduce.log -o cluster.yaml"""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `discover`."""
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
    gpus = find_gpus()
    measured = None
    if arguments.nccl_tests:
        test = parse_nccl_test(read_text(arguments.nccl_tests), str(arguments.nccl_tests))
        if test.num_wrong:
            raise UsageError(
                f"{arguments.nccl_tests} counts {test.num_wrong} wrong values: this machine's GPUs "
                "do not exchange what they are sent. Mend that before anything else; "
                "NCCL_P2P_DISABLE=1 is the first thing to try."
            )
        measured = test.link()
    if arguments.topology:
        topology = read_text(arguments.topology)
        joins = parse_topology(topology, str(arguments.topology))
    else:
        joins = parse_topology(topology_text(), "nvidia-smi topo -m") if len(gpus) > 1 else {}
    nodes = draft_nodes(gpus, joins, measured)
    text = cluster_yaml(nodes, "Written by megatron-hetero discover; look at what is a guess.")
    if arguments.output:
        write_new(arguments.output, text)
    if arguments.json:
        output.json({"gpus": [asdict(gpu) for gpu in gpus], "cluster": text})
    elif arguments.output:
        output.show(f"Written to {arguments.output}: {len(gpus)} GPUs")
    else:
        output.verbatim(text)
    return 0


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        UsageError: it is; a cluster file is somebody's work.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already; give another name, or remove it") from error
