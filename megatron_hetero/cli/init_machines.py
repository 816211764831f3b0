"""`init --nics` and `init --price`: facts of machines that no list of GPUs has."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.cli.ask_cluster import Draft
from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.inventory.draft import NicsDraft, NodeDraft
from megatron_hetero.cluster.names import expand_names
from megatron_hetero.cluster.nics import near_in_order
from megatron_hetero.errors import ClusterError, UsageError, some_of
from megatron_hetero.units import UnitError, parse_bandwidth

_NICS = re.compile(r"(?P<count>[0-9]{1,2})x(?P<bandwidth>.+)")
_PRICE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_BITS = 8
_GIGA = 1e9


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--nics` and `--price`."""
    parser.add_argument(
        "--nics", action="append", default=[], metavar="[MACHINES=]COUNTxBANDWIDTH",
        help="the NICs of machines near their GPUs, for example '4x200 Gb/s' or "
        "'a[0-3]=8x400 Gb/s'; MACHINES are names, a site or a GPU (default: all); repeat it",
    )  # fmt: skip
    parser.add_argument(
        "--price", action="append", default=[], metavar="[MACHINES=]PRICE",
        help="what a whole machine costs an hour, in your currency, for example 12.50 or "
        "RTX-4090=0.70; MACHINES as for --nics; repeat it",
    )  # fmt: skip


def with_machine_facts(draft: Draft, arguments: argparse.Namespace) -> Draft:
    """Return the draft with the NICs and prices that the user gave.

    Raises:
        UsageError: a value is malformed, or names no machine of the draft.
    """
    # Later words win, machine by machine.
    nodes = list(draft.nodes)
    for text in arguments.nics:
        chosen, value = _chosen("--nics", text, nodes)
        count, gb_per_s = _count_and_rate(text, value)
        for i in chosen:
            if count > nodes[i].count:
                raise UsageError(
                    f"--nics {text}: machine {nodes[i].name} has {nodes[i].count} GPUs, and a NIC "
                    "that is near none of them does not count; name other machines before `=`"
                )
            # NICs are divided among the GPUs in the order of the bus.
            near = near_in_order(nodes[i].count, count)
            nodes[i] = replace(nodes[i], nics=NicsDraft(near, gb_per_s))
    for text in arguments.price:
        chosen, value = _chosen("--price", text, nodes)
        if not _PRICE.fullmatch(value):
            raise UsageError(f"--price {text}: write a number for an hour, for example 12.50")
        for i in chosen:
            nodes[i] = replace(nodes[i], price_per_hour=value)
    return replace(draft, nodes=tuple(nodes))


def _count_and_rate(text: str, value: str) -> tuple[int, int]:
    """Read `4x200 Gb/s`: how many NICs, and Gb/s of each."""
    found = _NICS.fullmatch(value)
    if found is None or int(found["count"]) < 1:
        raise UsageError(f"--nics {text}: write COUNTxBANDWIDTH, for example 4x200 Gb/s")
    try:
        # The parser gives bytes/s; NICs are named by Gb/s.
        gb_per_s = parse_bandwidth(found["bandwidth"].strip()) * _BITS / _GIGA
    except UnitError as error:
        raise UsageError(f"--nics {text}: {error}") from None
    if gb_per_s < 1 or round(gb_per_s) != round(gb_per_s, 6):
        raise UsageError(f"--nics {text}: a NIC has a whole number of Gb/s, for example 100 Gb/s")
    return int(found["count"]), round(gb_per_s)


def _chosen(option: str, text: str, nodes: Sequence[NodeDraft]) -> tuple[list[int], str]:
    """Split MACHINES=VALUE: the places of the machines, all where none are named, and the value."""
    # The last `=` divides, because values hold none.
    which, equals, value = text.rpartition("=")
    if not equals:
        return list(range(len(nodes))), value.strip()
    wanted: set[str] = set()
    # Commas inside brackets belong to a range of names.
    for name in re.split(r",(?![^\[]*\])", which):
        try:
            wanted.add(gpu_type(name.strip()).name)
        except ClusterError:
            try:
                wanted.update(expand_names(name.strip()))
            except ValueError as error:
                raise UsageError(f"{option} {error}") from None
    # Place of a machine -> the names by which it may be meant.
    has = {
        i: {node.name, node.site, *(cards.gpu for cards in node.cards)}
        for i, node in enumerate(nodes)
    }
    missing = wanted.difference(*has.values())
    if missing:
        shown = some_of([node.name for node in nodes])
        unknown = some_of(sorted(missing))
        raise UsageError(
            f"{option} {text}: there is no machine, site or GPU {unknown} in the list; it has "
            f"{shown}"
        )
    return [i for i, names in has.items() if names & wanted], value.strip()
