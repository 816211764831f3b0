"""Nodes from the output of `scontrol show nodes`, in either form (`-o`: a line for each node)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NodeDraft,
    gpu_of_list,
    link_guess,
    node_of_cards,
)
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import read_text

_NODE_NAME = re.compile(r"(?:^|\s)NodeName=(\S*)")
_GRES = re.compile(r"\sGres=(\S*)")
_STATE = re.compile(r"\sState=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,()]+))?:(?P<count>[0-9]{1,4})(?:\([^)]*\))?(?=,|$)")
_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "FUTURE", "MAINT", "NO_RESPOND", "NOT_RESPONDING", "POWER")


def nodes_from_slurm(path: Path, means: Mapping[str, str]) -> Inventory:
    """Read the nodes with GPUs from a file with the output of `scontrol show nodes`.

    Nodes that are down or drained, or have no GPU, are left out.

    Args:
        means: the catalogue's GPU behind names that could be several ("a100": "A100-80GB").
    Raises:
        FileFormatError: the file cannot be read.
        ClusterError: it is no such text, a node's name is no host name, or a type of GPU could be
            several; with file and line.
    """
    nodes: list[NodeDraft] = []
    notes: list[str] = []
    found_any = False
    for line, block in _blocks(read_text(path)):
        found_any = True
        where = f"{path}:{line}"
        named = _NODE_NAME.search(block)
        name = "" if named is None else named[1]
        try:
            check_host_name(name)
        except ValueError as error:
            raise ClusterError(f"{where}: NodeName: {error}") from None
        state = _first(_STATE, block).upper()
        if any(word in state for word in _UNUSABLE):
            notes.append(f"{name} is left out: its state is {state[:40]}")
            continue
        gres = _first(_GRES, block)
        kinds = [(int(m["count"]), m["type"] or "gpu") for m in _GPUS.finditer(gres)]
        if not kinds:
            if "gpu" in gres:
                raise ClusterError(
                    f"{where}: node {name}: Gres={gres[:80]!r} names GPUs in a way that is not "
                    "known here; it should be like gpu:a100:4"
                )
            continue
        nodes.append(_node(where, name, kinds, means, notes))
    if not found_any:
        raise ClusterError(
            f"{path}:1: this is not what `scontrol show nodes` prints: no line begins with "
            "NodeName="
        )
    if not nodes:
        raise ClusterError(f"{path}:1: no node with GPUs is in use; {'; '.join(notes[:5])}")
    return Inventory(tuple(nodes), tuple(notes))


def _node(
    where: str,
    name: str,
    kinds: list[tuple[int, str]],
    means: Mapping[str, str],
    notes: list[str],
) -> NodeDraft:
    cards = []
    for count, kind in kinds:
        if kind == "gpu" and kind not in means:
            raise ClusterError(
                f"{where}: node {name}: Slurm does not say which GPUs these are "
                f"(Gres=gpu:{count}); say it with --gpu-name gpu=A100-80GB"
            )
        try:
            gpu, described = gpu_of_list(kind, means)
        except ClusterError as error:
            raise ClusterError(f"{where}: node {name}: {error}") from None
        cards.append(CardsDraft(gpu, count, link_guess(gpu), described=described))
    if len(cards) > 1:
        notes.append(
            f"the unlike GPUs of {name} are written in the order of its Gres; put them in that of "
            "the PCI bus (`nvidia-smi -L` there)"
        )
    return node_of_cards(name, cards)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield each node's text, on one line, with the number of its first line."""
    first, lines = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("NodeName="):
            if lines:
                yield first, " ".join(lines)
            first, lines = number, [line]
        elif lines and line.strip():
            lines.append(line)
    if lines:
        yield first, " ".join(lines)


def _first(pattern: re.Pattern[str], block: str) -> str:
    found = pattern.search(block)
    return "" if found is None else found[1]
