"""Nodes from the output of `scontrol show nodes`, in either form (`-o`: a line for each node)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_hetero.cluster.gpu_names import part_of_card
from megatron_hetero.cluster.inventory.card_names import CardNames, num_taken, summarised
from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NodeDraft,
    link_guess,
    node_of_cards,
)
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import read_text

_NODE_NAME = re.compile(r"(?:^|\s)NodeName=(\S*)")
_GRES = re.compile(r"\sGres=(\S*)")
_STATE = re.compile(r"\sState=(\S*)")
_PARTITIONS = re.compile(r"\sPartitions=(\S*)")
_ALLOCATED = re.compile(r"\sAllocTRES=(\S*)")
_CONFIGURED = re.compile(r"\sCfgTRES=(\S*)")
_GRES_USED = re.compile(r"\sGresUsed=(\S*)")
_GPUS = re.compile(
    r"(?:^|,)gpu(?::(?:\(null\)|(?P<type>[^:,()]+)))?:(?P<count>[0-9]{1,4})(?:\([^)]*\))?(?=,|$)"
)
_IN_USE = re.compile(r"(?:^|,)gres/gpu(?::(?P<type>[^:,=]+))?=(?P<count>[0-9]{1,4})(?=,|$)")
_UNUSABLE = frozenset(
    {
        *("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL"),
        *("INVALID_REG", "MAINT", "NO_RESPOND", "NOT_RESPONDING", "UNKNOWN", "BLOCKED"),
        *("REBOOT_REQUESTED", "REBOOT_ISSUED"),
    }
)
"""States in which Slurm gives a node to nobody.  A node that is powered down is there: Slurm starts
it, and in a cloud rents it, when a job asks for it."""
_UNCOUNTED = (
    "how many of its GPUs are free is not known, for Slurm's TRES do not count them; "
    "`scontrol show nodes -d` does, as GresUsed"
)
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINT",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""What a mark behind a state says ("IDLE*"), in the words of newer releases (`man sinfo`)."""


def nodes_from_slurm(path: Path, means: Mapping[str, str], is_only_free: bool = False) -> Inventory:
    """Read the nodes with GPUs from a file with the output of `scontrol show nodes`.

    Nodes that are down or drained, or have no GPU, are left out, and so are slices of cards (MIG)
    beside whole ones.

    Args:
        means: the catalogue's GPU behind names that could be several ("a100": "A100-80GB").
        is_only_free: GPUs that jobs hold now are left out, by the node's `GresUsed`, or else
            its `AllocTRES`; so are nodes with jobs where neither counts them.
    Raises:
        FileFormatError: the file cannot be read.
        ClusterError: it is no such text, a node's name is no host name, or types of GPUs could be
            several; with file and line.
    """
    nodes: list[NodeDraft] = []
    names = CardNames(means)
    # Reason -> nodes that share it, so that notes stay short.
    reasons: dict[str, list[str]] = defaultdict(list)
    partitions: dict[str, set[str]] = defaultdict(set)
    found_any, num_without = False, 0
    for line, block in _blocks(read_text(path)):
        found_any = True
        where = f"{path}:{line}"
        name = _first(_NODE_NAME, block)
        try:
            check_host_name(name)
        except ValueError as error:
            raise ClusterError(f"{where}: NodeName: {error}") from None
        gres = _first(_GRES, block)
        # (count, type) of each kind of GPU that the node has.
        found = list(_GPUS.finditer(gres))
        kinds = [(int(m["count"]), m["type"] or "gpu") for m in found if int(m["count"])]
        state = _first(_STATE, block).upper()
        # Leave out nodes that are down, and nodes without GPUs.
        # A node that is down and has no GPUs is no loss worth a note.
        if any(word in _UNUSABLE for word in _words(state)) and (kinds or "gpu" in gres):
            reasons[f"is left out: its state is {state[:60]}"].append(name)
            continue
        if not kinds:
            # A Gres that names GPUs in another form must not pass for a node without.
            if not found and re.search(r"(?:^|,)gpu\b", gres):
                raise ClusterError(
                    f"{where}: node {name}: Gres={gres[:80]!r} names GPUs in a way that is not "
                    "known here; it should be like gpu:a100:4"
                )
            num_without += 1
            continue
        if is_only_free:
            kinds = _free_kinds(name, state, kinds, block, reasons)
            if not kinds:
                continue
        # Take the node, and note its state and its partitions.
        node = _node(where, name, kinds, names, reasons)
        if node is None:
            continue
        nodes.append(node)
        _note_state(name, state, None if is_only_free else node.count, block, reasons)
        # A node may be in several partitions, each of which takes its jobs.
        for partition in filter(None, _first(_PARTITIONS, block).split(",")):
            for cards in node.cards:
                partitions[cards.gpu].add(partition[:64])
    if not found_any:
        raise ClusterError(
            f"{path}:1: this is not what `scontrol show nodes` prints: no line begins with "
            "NodeName="
        )
    notes = summarised(reasons)
    if not nodes:
        why = "; ".join(notes[:5]) or "no Gres of a node names a gpu (gres.conf says which it has)"
        raise ClusterError(f"{path}:1: no node with GPUs is in use; {why}")
    taken = num_taken(len(nodes))
    if num_without:
        taken += f", {num_without} without GPUs left out"
    return Inventory(
        tuple(nodes), (*names.check(), *notes, *_partition_notes(partitions, nodes), taken)
    )


def _node(
    where: str,
    name: str,
    kinds: list[tuple[int, str]],
    names: CardNames,
    reasons: dict[str, list[str]],
) -> NodeDraft | None:
    """Describe a node by its whole cards; None where it has none."""
    slices = [(kind, part_of_card(kind)) for _, kind in kinds if part_of_card(kind)]
    whole = [(count, kind) for count, kind in kinds if not part_of_card(kind)]
    if slices:
        what = f"{', '.join(kind[:64] for kind, _ in slices)} ({slices[0][1]})"
        if not whole:
            reasons[f"is left out: its GPUs are cut into parts, {what}"].append(name)
            return None
        reasons[f"is taken without its parts of cards, {what}"].append(name)
    cards = []
    for count, kind in whole:
        # An untyped Gres says only that there are GPUs; with the other open names it is asked for.
        if kind == "gpu" and kind not in names:
            names.ask(
                kind,
                f"{where}: node {name}: Slurm does not say which GPUs these are (Gres=gpu:{count})",
            )
            continue
        gpu, described = names.find(f"{where}: node {name}", kind)
        cards.append(CardsDraft(gpu, count, link_guess(gpu), described=described))
    if len(cards) > 1:
        reasons[
            "has unlike GPUs, written in the order of its Gres; put them in that of the PCI bus "
            "(`nvidia-smi -L` there)"
        ].append(name)
    return node_of_cards(name, cards)


def _note_state(
    name: str, state: str, count: int | None, block: str, reasons: dict[str, list[str]]
) -> None:
    """Note the resources of a listed node that are not free now; `count` is None where GPUs in use
    are left out already."""
    words = _words(state)
    if any(word.startswith("POWER") for word in words):
        reasons["is powered down or on its way; Slurm starts it for a job"].append(name)
    # Reserved nodes are taken: the user may hold the reservation.
    if "RESERVED" in words:
        reasons["is reserved: name the reservation to Slurm"].append(name)
    # A mixed node has jobs on some of its GPUs.
    if "MIXED" in words and count is not None:
        in_use = _in_use(block)
        if in_use is None:
            reasons[f"is taken with all its GPUs: {_UNCOUNTED}"].append(name)
        elif held := sum(in_use.values()):
            free = max(0, count - held)
            reasons[
                f"has {free} of {count} GPUs free now; it is taken with all (--free takes these)"
            ].append(name)


def _in_use(block: str) -> dict[str, int] | None:
    """Count the whole GPUs that jobs hold, by type; under "" where Slurm gives the total alone.

    None where the list does not count them: it has no `GresUsed`, and TRES have GPUs only on
    clusters whose `AccountingStorageTRES` names `gres/gpu`.
    """
    used = _first(_GRES_USED, block)
    found = list(_GPUS.finditer(used))
    # Part of the GPUs in another form would pass for all of them.
    if found and len(found) == len(re.findall(r"(?:^|,)gpu\b", used)):
        counts: dict[str, int] = defaultdict(int)
        for m in found:
            counts[m["type"] or ""] += int(m["count"])
        return {kind: count for kind, count in counts.items() if not part_of_card(kind)}
    allocated = _first(_ALLOCATED, block)
    if not any(map(_IN_USE.search, (allocated, _first(_CONFIGURED, block)))):
        return None
    found = list(_IN_USE.finditer(allocated))
    typed = {m["type"]: int(m["count"]) for m in found if m["type"]}
    if typed:
        return {kind: count for kind, count in typed.items() if not part_of_card(kind)}
    # Totals without a type count all kinds together.
    return {"": sum(int(m["count"]) for m in found)}


def _free_kinds(
    name: str,
    state: str,
    kinds: list[tuple[int, str]],
    block: str,
    reasons: dict[str, list[str]],
) -> list[tuple[int, str]]:
    """Return the GPUs of a node that no job holds; none of a node whose processors are all taken,
    where no job could start.

    Args:
        kinds: (count, type) of all its GPUs.
    """
    if "ALLOCATED" in _words(state) or "COMPLETING" in _words(state):
        reasons[f"is left out: no job can start there now (its state is {state[:60]})"].append(name)
        return []
    in_use = _in_use(block)
    if in_use is None:
        # A node without jobs needs no count.
        if "MIXED" not in _words(state) and not _first(_ALLOCATED, block):
            return kinds
        reasons[f"is left out: {_UNCOUNTED}"].append(name)
        return []
    # A total, or a type beside an untyped Gres, does not say which of several kinds is in use.
    unnamed = sum(count for held, count in in_use.items() if held not in {k for _, k in kinds})
    if unnamed and len(kinds) > 1:
        reasons["is left out: Slurm does not say which of its unlike GPUs are free"].append(name)
        return []
    free = []
    for count, kind in kinds:
        held = in_use.get(kind, 0) + unnamed
        free += [(count - held, kind)] if held < count else []
    total, left = sum(count for count, _ in kinds), sum(count for count, _ in free)
    if left < total:
        what = "the free part is taken: launch it with --share-nodes" if left else "it is left out"
        reasons[f"has {left} of {total} GPUs free now; {what}"].append(name)
    return free


def _partition_notes(
    partitions: Mapping[str, set[str]], nodes: Sequence[NodeDraft]
) -> Iterator[str]:
    """Say how `launch --for slurm` gets the partitions of these nodes."""
    if not partitions:
        return
    words = [f"--partition {gpu}={','.join(sorted(found))}" for gpu, found in partitions.items()]
    # One set of partitions for all kinds of GPU needs no names of these.
    kinds = {cards.gpu for node in nodes for cards in node.cards}
    if set(partitions) == kinds and len({frozenset(p) for p in partitions.values()}) == 1:
        words = [f"--partition {','.join(sorted(next(iter(partitions.values()))))}"]
    yield f"Slurm's partitions, for `launch --for slurm`: {' '.join(words)}"


def _words(state: str) -> list[str]:
    # States come as joined words, each with marks or without: "MIXED+DRAIN", "IDLE*+CLOUD".
    words = [word.rstrip("".join(_MARKS)) for word in state.split("+")]
    return words + [_MARKS[mark] for mark in state if mark in _MARKS]


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield each node's text as a single line, with the number of its first line."""
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
