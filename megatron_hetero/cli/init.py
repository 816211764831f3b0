"""`megatron-hetero init`: a starter cluster.yaml from names typed by hand."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatron_hetero.cli.discover import write_new
from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.description import load_cluster
from megatron_hetero.cluster.discovery import GUESSES, NodeDraft, cluster_yaml
from megatron_hetero.errors import UsageError

DESCRIPTION = """\
Write a starter cluster.yaml: name your machines and their GPUs, correct what is
marked as a guess, and plan.

  megatron-hetero init --node a100-0=4xA100-80GB --node rtx-0=2xRTX-4090"""
TAKES_MEGATRON_FLAGS = False

_NODE = re.compile(r"(?P<name>[^=]+)=(?P<count>[0-9]{1,2})x(?P<gpu>.+)")
_NVLINK = ("A100", "A800", "H100-80GB", "H200", "GH200", "B200", "V100")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `init`."""
    parser.add_argument(
        "--node", action="append", required=True, metavar="NAME=COUNTxGPU",
        help="a machine and its equal GPUs, for example rtx-0=2xRTX-4090; repeat it",
    )  # fmt: skip
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("cluster.yaml"),
        metavar="CLUSTER.YAML",
        help="the file to write (default: cluster.yaml)",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the file and check that it loads."""
    nodes = tuple(_node(text) for text in arguments.node)
    heading = "A starter: correct what is marked as a guess, then plan."
    write_new(arguments.output, cluster_yaml(nodes, heading))
    try:
        load_cluster(arguments.output)
    except Exception:
        arguments.output.unlink()
        raise
    output.show(
        f"Written to {arguments.output}; next: megatron-hetero plan --cluster {arguments.output} "
        "--model FILE, a Megatron script or a Hugging Face config.json"
    )
    return 0


def _node(text: str) -> NodeDraft:
    found = _NODE.fullmatch(text)
    if found is None:
        raise UsageError(f"--node {text}: write NAME=COUNTxGPU, for example rtx-0=2xRTX-4090")
    gpu = gpu_type(found["gpu"]).name
    fast = gpu.startswith(_NVLINK) and "PCIe" not in gpu
    return NodeDraft(found["name"], gpu, int(found["count"]), GUESSES["NV" if fast else "PHB"],
                     link_is_measured=False)  # fmt: skip
