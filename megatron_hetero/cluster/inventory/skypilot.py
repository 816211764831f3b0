"""Nodes from SkyPilot task files: `num_nodes` machines with `resources.accelerators` each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NodeDraft,
    gpu_of_list,
    link_guess,
)
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import Document, read_yaml

_MEANS = {
    "A100": "A100-40GB",
    "A100-80GB-SXM": "A100-80GB",
    "H100-SXM": "H100-80GB",
    "H100-MEGA": "H100-80GB",
    "RTX6000-Ada": "RTX-6000-Ada",
    "V100": "V100-16GB",
}
"""SkyPilot's names that are not the catalogue's, or could be several of its GPUs."""
_ACCELERATOR = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9. -]{0,63})(?::(?P<count>[0-9.]{1,8}))?")
_MAX_NODES = 8192


def nodes_from_skypilot(paths: Sequence[Path], means: Mapping[str, str]) -> Inventory:
    """Read the machines that SkyPilot tasks would rent; nothing of a task is run.

    A task's machines are alike, so unlike ones come from several files.  Where a task leaves a
    choice of accelerators, the first is taken.  The cloud and region of a task is its site where
    the tasks have several.

    Args:
        means: the catalogue's GPU behind names that could be several.
    Raises:
        FileFormatError: a file cannot be read, or is no YAML.
        ClusterError: a task has no accelerators, or says something impossible; with file, line and
            key.
    """
    nodes: list[NodeDraft] = []
    notes: list[str] = []
    taken: set[str] = set()
    tasks = [(read_yaml(path), number) for number, path in enumerate(paths)]
    sites = {_site(document.data) for document, _ in tasks}
    for document, number in tasks:
        site = _site(document.data) if len(sites) > 1 else "main"
        made = _nodes(document, number, site, {**_MEANS, **means}, taken, notes)
        if len(nodes) + len(made) > _MAX_NODES:
            _fail(document, ("num_nodes",), f"more than {_MAX_NODES} nodes in all")
        nodes += made
    return Inventory(tuple(nodes), tuple(notes))


def _nodes(
    document: Document,
    number: int,
    site: str,
    means: Mapping[str, str],
    taken: set[str],
    notes: list[str],
) -> list[NodeDraft]:
    data = document.data
    if not isinstance(data, dict):
        _fail(document, (), "this is not a SkyPilot task: a mapping with `resources`")
    num_nodes = data.get("num_nodes")
    num_nodes = 1 if num_nodes is None else num_nodes
    is_number = isinstance(num_nodes, int) and not isinstance(num_nodes, bool)
    if not is_number or not 1 <= num_nodes <= _MAX_NODES:
        _fail(document, ("num_nodes",), f"{num_nodes!r} is not a number of nodes, 1 to 8192")
    keypath, accelerator = _accelerator(document, notes)
    found = _ACCELERATOR.fullmatch(accelerator)
    count = "1" if found is None else found["count"] or "1"
    if found is None or not count.isdecimal() or int(count) < 1:
        _fail(
            document, keypath, f"{accelerator[:80]!r} is not NAME:COUNT with whole GPUs, as H100:8"
        )
    try:
        gpu, described = gpu_of_list(found["name"], means)
    except ClusterError as error:
        _fail(document, keypath, str(error))
    name = data.get("name")
    name = name if isinstance(name, str) else gpu
    name = re.sub(r"[^A-Za-z0-9-]", "-", name).strip("-")[:48] or "node"
    if name in taken:
        name = f"{name}-{number}"
    taken.add(name)
    cards = CardsDraft(gpu, int(count), link_guess(gpu), described=described)
    return [NodeDraft(f"{name}-{i}", (cards,), site) for i in range(num_nodes)]


def _accelerator(document: Document, notes: list[str]) -> tuple[tuple[str | int, ...], str]:
    """Find the accelerators of a task as NAME:COUNT, and where they stand."""
    keypath: tuple[str | int, ...] = ("resources",)
    resources: Any = document.data.get("resources")
    for choice in ("any_of", "ordered"):
        options = resources.get(choice) if isinstance(resources, dict) else None
        if isinstance(options, list) and options and "accelerators" not in resources:
            keypath, resources = (*keypath, choice, 0), options[0]
            if len(options) > 1:
                notes.append(f"{document.path}: of {len(options)} choices the first is taken")
    keypath = (*keypath, "accelerators")
    given: Any = resources.get("accelerators") if isinstance(resources, dict) else None
    if isinstance(given, list) and given:
        if len(given) > 1:
            notes.append(f"{document.path}: of {len(given)} accelerators the first is taken")
        keypath, given = (*keypath, 0), given[0]
    if isinstance(given, dict) and given:
        if len(given) > 1:
            notes.append(f"{document.path}: of {len(given)} accelerators the first is taken")
        name, count = next(iter(given.items()))
        given = name if count is None else f"{name}:{count}"
    if not isinstance(given, str):
        _fail(
            document,
            keypath,
            "the task names no GPUs: resources.accelerators, for example H100:8, is needed (an "
            "instance_type alone does not say them)",
        )
    return keypath, given


def _site(data: Any) -> str:
    resources = data.get("resources") if isinstance(data, dict) else None
    if not isinstance(resources, dict):
        return "main"
    parts = [resources.get(key) for key in ("infra", "cloud", "region")]
    words = "-".join(part for part in parts if isinstance(part, str))
    return re.sub(r"[^A-Za-z0-9-]+", "-", words).strip("-")[:63].strip("-") or "main"


def _fail(document: Document, keypath: tuple[str | int, ...], message: str) -> NoReturn:
    key = ".".join(map(str, keypath))
    raise ClusterError(f"{document.locate(keypath)}: {key + ': ' if key else ''}{message}")
