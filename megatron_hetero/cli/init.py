"""`megatron-hetero init`: a starter cluster.yaml from names, a scheduler's list, or answers."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_hetero.cli.arguments import add_model_argument
from megatron_hetero.cli.ask_cluster import Draft, ask_cluster
from megatron_hetero.cli.discover import unknown_types, what_next, write_new
from megatron_hetero.cli.init_job import write_job
from megatron_hetero.cli.init_machines import add_machine_arguments, with_machine_facts
from megatron_hetero.cli.init_options import SOURCES, source_of
from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NetworkDraft,
    NodeDraft,
    TypeDraft,
    check_machines,
    link_guess,
    node_of_cards,
)
from megatron_hetero.cluster.inventory.kubernetes import nodes_from_kubernetes
from megatron_hetero.cluster.inventory.skypilot import nodes_from_skypilot
from megatron_hetero.cluster.inventory.slurm import nodes_from_slurm
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.cluster.makers import LIBRARIES, Library, library_of_name
from megatron_hetero.cluster.names import expand_names
from megatron_hetero.errors import ClusterError, UsageError
from megatron_hetero.units import UnitError, parse_bandwidth, parse_bytes, parse_duration
from megatron_hetero.units import parse_flops as parse_peak

DESCRIPTION = """\
Write a starter cluster.yaml: from machines named here, from the list that a
scheduler prints, or, on a terminal without any of these, from your answers to a
few questions.  Correct what is marked as a guess, and plan.

  megatron-hetero init
  megatron-hetero init --node a100-0=4xA100-80GB --node box=1xRTX-4090+2xRTX-3090
  megatron-hetero init --node "a[0-3]=8xA100-80GB" --nics "8x200 Gb/s" --price 12.50
  scontrol show nodes > nodes.txt;  megatron-hetero init --from-slurm nodes.txt
  kubectl get nodes -o json > nodes.json
  megatron-hetero init --from-kubernetes nodes.json --gpu-name A100=A100-80GB

Or, with --job, write the script of a training job: the model's flags, and all
that a job needs beside them, with what only you can know marked as MISSING.

  megatron-hetero init --job --model config.json -- --seq-length 4096"""
TAKES_MEGATRON_FLAGS = True

_NODE = re.compile(r"(?P<name>[^=]+)=(?P<cards>[^@]+)(?:@(?P<site>.+))?")
_CARDS = re.compile(r"(?P<count>[0-9]{1,2})x(?P<gpu>.+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `init`."""
    parser.add_argument(
        "--node", action="append", metavar="NAME=COUNTxGPU[+COUNTxGPU][@SITE]",
        help="a machine and its GPUs, for example rtx-0=2xRTX-4090@lab, unlike ones in the order "
        "of the PCI bus: box=1xRTX-4090+2xRTX-3090; a[0-3]=8xH100-80GB are four; repeat it",
    )  # fmt: skip
    parser.add_argument(
        "--from-slurm", type=Path, metavar="FILE", help="what `scontrol show nodes` printed"
    )
    parser.add_argument(
        "--from-kubernetes", type=Path, metavar="FILE",
        help="what `kubectl get nodes -o json` printed",
    )  # fmt: skip
    parser.add_argument(
        "--from-skypilot", type=Path, nargs="+", metavar="TASK.YAML",
        help="SkyPilot tasks, one for each kind of machine; they are read, never run",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-name", action="append", default=[], metavar="NAME=GPU",
        help="what a scheduler's name means, where it could be several: a100=A100-80GB; repeat it",
    )  # fmt: skip
    parser.add_argument(
        "--own-type", action="append", default=[], metavar="NAME=MEMORY,BANDWIDTH,BF16[,LIBRARY]",
        help="a GPU that the catalogue lacks, for example 'MY-CARD=24 GB,900 GB/s,120 TFLOPS,NCCL'",
    )  # fmt: skip
    parser.add_argument(
        "--between-nodes", action="append", default=[], metavar="[SITE=]BANDWIDTH,LATENCY",
        help="the network inside a site, for example '25 Gb/s,30 us' (default: a guess)",
    )  # fmt: skip
    parser.add_argument(
        "--between-sites", action="append", default=[], metavar="A,B=BANDWIDTH,LATENCY",
        help="the network between two sites, for example 'lab,attic=1 Gb/s,8 ms'; repeat it",
    )  # fmt: skip
    parser.add_argument(
        "--free", action="store_true",
        help="with --from-slurm: only GPUs that no job holds now",
    )  # fmt: skip
    add_machine_arguments(parser)
    parser.add_argument("--job", action="store_true", help="write the script of a training job")
    add_model_argument(
        parser, "with --job: a Hugging Face config.json, a Megatron script or a file of its flags"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: cluster.yaml; train.sh with --job)",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the cluster file and check that `plan` can load the file."""
    if arguments.job:
        return write_job(arguments, output)
    arguments.output = arguments.output or Path("cluster.yaml")
    if arguments.model is not None or arguments.megatron_args:
        raise UsageError("--model and Megatron's flags belong to --job")
    if arguments.output.exists():  # before anybody answers questions
        raise UsageError(f"{arguments.output} is there already; give another name, or remove it")
    draft = with_machine_facts(_draft(arguments, output), arguments)
    heading = "A starter: correct what is marked as a guess, then plan."
    write_new(arguments.output, cluster_yaml(draft.nodes, heading, draft.network))
    # A file with question marks cannot be loaded yet; any other one has to be.
    if not unknown_types(draft.nodes):
        try:
            load_cluster(arguments.output)
        except Exception:
            # A file that does not load is this program's fault, and does not stay.
            arguments.output.unlink()
            raise
    output.show(f"Written to {arguments.output}; {what_next(arguments.output, draft.nodes)}")
    return 0


def _draft(arguments: argparse.Namespace, output: Output) -> Draft:
    # A name of the scheduler -> a type of the catalogue, checked before any file is read.
    means = dict(_pair("--gpu-name", text) for text in arguments.gpu_name)
    for name in means.values():
        gpu_type(name)
    # Without a list the user is asked, on a terminal.
    if source_of(arguments) is None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageError(
                f"give {', '.join(SOURCES)}, or run init on a terminal, where it asks: for "
                "example --node a100-0=4xA100-80GB"
            )
        return ask_cluster(input, output.note)
    # Types with the user's numbers, for the machines typed here.
    own = dict(_own_type(text) for text in arguments.own_type)
    if arguments.node is not None:
        inventory, source = Inventory(_typed_nodes(arguments.node, own)), "--node"
    elif arguments.from_slurm is not None:
        source = str(arguments.from_slurm)
        inventory = nodes_from_slurm(arguments.from_slurm, means, arguments.free)
    elif arguments.from_kubernetes is not None:
        source = str(arguments.from_kubernetes)
        inventory = nodes_from_kubernetes(arguments.from_kubernetes, means)
    else:
        source = ", ".join(map(str, arguments.from_skypilot))
        inventory = nodes_from_skypilot(arguments.from_skypilot, means)
    check_machines(inventory.nodes, source)
    for note in inventory.notes:
        output.note(note)
    return Draft(inventory.nodes, _network(arguments, inventory.nodes))


def _typed_nodes(texts: Sequence[str], own: Mapping[str, TypeDraft]) -> tuple[NodeDraft, ...]:
    """Return all machines of `--node`; the GPUs that nobody knows are named together."""
    nodes: list[NodeDraft] = []
    # Unknown GPUs in the order of the machines, each once.
    faults: dict[str, None] = {}
    for text in texts:
        try:
            nodes += _nodes(text, own)
        except ClusterError as error:
            faults[str(error)] = None
    if faults:
        raise ClusterError("\n".join(faults))
    return tuple(nodes)


def _nodes(text: str, own: Mapping[str, TypeDraft]) -> list[NodeDraft]:
    # NAME=CARDS@SITE, where CARDS are COUNTxGPU joined by `+`.
    found = _NODE.fullmatch(text)
    words = () if found is None else [_CARDS.fullmatch(word) for word in found["cards"].split("+")]
    cards = [_cards(word["count"], word["gpu"], own) for word in words if word is not None]
    if found is None or len(cards) < len(words):
        raise UsageError(
            f"--node {text}: write NAME=COUNTxGPU, for example rtx-0=2xRTX-4090 or "
            "box=1xRTX-4090+2xRTX-3090, and @SITE behind it where there are several sites"
        )
    try:
        names = expand_names(found["name"])
    except ValueError as error:
        raise UsageError(f"--node {error}") from None
    return [node_of_cards(name, cards, found["site"] or "main") for name in names]


def _cards(count: str, gpu: str, own: Mapping[str, TypeDraft]) -> CardsDraft:
    described = own.get(gpu)
    try:
        name = gpu if described else gpu_type(gpu).name
    except ClusterError as error:
        raise ClusterError(
            f"{error} (here: --own-type {gpu}=24 GB,900 GB/s,120 TFLOPS,NCCL, with your numbers)"
        ) from None
    return CardsDraft(name, int(count), link_guess(name), described=described)


def _own_type(text: str) -> tuple[str, TypeDraft]:
    name, values = _pair("--own-type", text)
    parts = [part.strip() for part in values.split(",")]
    library: Library | None = None
    # The library is the fourth value, where there is one.
    if len(parts) == 4:
        last = parts.pop()
        library = next((known for known in LIBRARIES if known == last), None)
        if library is None:
            raise UsageError(f"--own-type {text}: a library is one of {', '.join(LIBRARIES)}")
    if len(parts) != 3:
        raise UsageError(
            f"--own-type {text}: write NAME=MEMORY,BANDWIDTH,BF16, for example "
            "MY-CARD=24 GB,900 GB/s,120 TFLOPS,NCCL"
        )
    if library is None and library_of_name(name) is None:
        raise UsageError(
            f"--own-type {text}: the name shows no maker; add the communication library behind the "
            f"peak: {', '.join(LIBRARIES)} (NCCL for an NVIDIA GPU)"
        )
    # The values stay as they were typed; parsing only judges them.
    for part, parse in zip(parts, (parse_bytes, parse_bandwidth, parse_peak), strict=True):
        _checked("--own-type", part, parse)
    memory, bandwidth, peak = parts
    return name, TypeDraft(memory, bandwidth, peak, library=library)


def _network(arguments: argparse.Namespace, nodes: Sequence[NodeDraft]) -> NetworkDraft:
    sites = tuple(dict.fromkeys(node.site for node in nodes))
    inside: dict[str, tuple[str, str]] = {}
    for text in arguments.between_nodes:
        site, equals, link = text.rpartition("=")
        # Without a site the link holds inside every site.
        for name in [_known(site, sites, "--between-nodes")] if equals else sites:
            inside[name] = _link("--between-nodes", link)
    between: dict[tuple[str, str], tuple[str, str]] = {}
    for text in arguments.between_sites:
        pair, link = _pair("--between-sites", text)
        names = [_known(name.strip(), sites, "--between-sites") for name in pair.split(",")]
        if len(set(names)) != 2:
            raise UsageError(f"--between-sites {text}: name two sites, as lab,attic=1 Gb/s,8 ms")
        between[names[0], names[1]] = _link("--between-sites", link)
    return NetworkDraft(inside, between)


def _known(site: str, sites: Sequence[str], option: str) -> str:
    if site not in sites:
        raise UsageError(
            f'{option}: there is no site "{site}"; the nodes are at {", ".join(sites)}'
        )
    return site


def _link(option: str, text: str) -> tuple[str, str]:
    bandwidth, comma, latency = text.partition(",")
    if not comma:
        raise UsageError(f"{option} {text}: write BANDWIDTH,LATENCY, for example 25 Gb/s,30 us")
    bandwidth, latency = bandwidth.strip(), latency.strip()
    _checked(option, bandwidth, parse_bandwidth)
    _checked(option, latency, parse_duration)
    return bandwidth, latency


def _checked(option: str, text: str, parse: Callable[[object], float]) -> None:
    try:
        parse(text)
    except UnitError as error:
        raise UsageError(f"{option}: {error}") from None


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise UsageError(f"{option} {text}: write NAME=VALUE")
    return name.strip(), value.strip()
