"""Nodes from SkyPilot task files: `num_nodes` machines with `resources.accelerators` each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_hetero.cluster.inventory.card_names import CardNames, num_taken
from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NodeDraft,
    link_guess,
)
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import Document, read_yaml

_MEANS = {
    "A100": "A100-40GB",
    "A100-80GB-SXM": "A100-80GB",
    "H100-SXM": "H100-80GB",
    "H100-MEGA": "H100-80GB",
    "H200-SXM": "H200",
    "RTX6000-Ada": "RTX-6000-Ada",
    "RTXPRO6000": "RTX-PRO-6000-Server",
    "V100": "V100-16GB",
}
"""SkyPilot's names that the catalogue lacks, or with several GPUs in the catalogue."""
_ACCELERATOR = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9. -]{0,63})(?::(?P<count>[0-9.]{1,8}))?")
_READ = ("accelerators", "any_of", "ordered", "infra", "cloud", "region", "zone", "use_spot")
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
    names = CardNames(means, _MEANS)
    taken: set[str] = set()
    tasks = [_task(read_yaml(path), notes) for path in paths]
    sites = {task.site for task in tasks}
    # One kind of machine for each task; sites only where the tasks have several.
    for number, task in enumerate(tasks):
        made = _nodes(task, number, task.site if len(sites) > 1 else "main", names, taken)
        if len(nodes) + len(made) > _MAX_NODES:
            _fail(task.document, ("num_nodes",), f"more than {_MAX_NODES} nodes in all")
        nodes += made
        gpu = made[0].cards[0].gpu
        if task.infra:
            # What `launch` will need, as notes.
            notes.append(
                f"{task.document.path}: for `launch --for skypilot`: --infra {gpu}={task.infra}"
            )
        if task.is_spot:
            notes.append(
                f"{task.document.path}: its machines are spot, and may be taken away: give --spot "
                "to `launch --for skypilot`"
            )
    return Inventory(tuple(nodes), (*names.check(), *notes, num_taken(len(nodes))))


@dataclass(frozen=True)
class _Task:
    """A task with the choice among its resources made; `keypath` leads to the accelerators."""

    document: Document
    keypath: tuple[str | int, ...]
    accelerator: str
    infra: str
    is_spot: bool

    @property
    def site(self) -> str:
        return re.sub(r"[^A-Za-z0-9-]+", "-", self.infra).strip("-")[:63].strip("-") or "main"


def _task(document: Document, notes: list[str]) -> _Task:
    """Read a task; note each choice, and what of the task a cluster file has no place for."""
    if not isinstance(document.data, dict):
        _fail(document, (), "this is not a SkyPilot task: a mapping with `resources`")
    keypath: tuple[str | int, ...] = ("resources",)
    resources: Any = document.data.get("resources")
    for choice in ("any_of", "ordered"):
        options = resources.get(choice) if isinstance(resources, dict) else None
        if isinstance(options, list) and options and isinstance(options[0], dict):
            keypath = (*keypath, choice, 0) if "accelerators" in options[0] else keypath
            resources = {**{k: v for k, v in resources.items() if k != choice}, **options[0]}
            if len(options) > 1:
                notes.append(
                    f"{document.locate(('resources', choice))}: of {len(options)} choices the "
                    f"first is taken: {_short(options[0])}"
                )
    keypath, accelerator = _accelerator(document, (*keypath, "accelerators"), resources, notes)
    left = [key for key in resources if key not in _READ]
    left += [key for key in document.data if key not in ("resources", "num_nodes", "name")]
    left = [key for key in left if key not in ("run", "setup")]
    if left:
        notes.append(
            f"{document.path}: a cluster file has no place for {', '.join(map(str, left[:12]))}; "
            "copy them into the tasks that `launch --for skypilot` writes"
        )
    words = [resources.get(key) for key in ("infra", "cloud", "region", "zone")]
    infra = "/".join(word for word in words if isinstance(word, str))[:120]
    return _Task(document, keypath, accelerator, infra, resources.get("use_spot") is True)


def _nodes(
    task: _Task, number: int, site: str, names: CardNames, taken: set[str]
) -> list[NodeDraft]:
    document, data = task.document, task.document.data
    # A whole number of nodes, and of GPUs in each.
    num_nodes = data.get("num_nodes")
    num_nodes = 1 if num_nodes is None else num_nodes
    is_number = isinstance(num_nodes, int) and not isinstance(num_nodes, bool)
    if not is_number or not 1 <= num_nodes <= _MAX_NODES:
        hint = (
            ": SkyPilot fills in no variable there; write the number"
            if isinstance(num_nodes, str) and "$" in num_nodes
            else ""
        )
        _fail(
            document,
            ("num_nodes",),
            f"{repr(num_nodes)[:40]} is not a number of nodes, 1 to 8192{hint}",
        )
    found = _ACCELERATOR.fullmatch(task.accelerator)
    count = "1" if found is None else found["count"] or "1"
    if found is None or not count.isdecimal() or int(count) < 1:
        _fail(
            document,
            task.keypath,
            f"{task.accelerator[:80]!r} is not NAME:COUNT with whole GPUs, as H100:8",
        )
    where = document.locate(task.keypath)
    gpu, described = names.find(where, found["name"])
    # A name that no other task has.
    name = data.get("name")
    name = name if isinstance(name, str) else gpu
    name = re.sub(r"[^A-Za-z0-9-]", "-", name).strip("-")[:48] or "node"
    if name in taken:
        name = f"{name}-{number}"
    taken.add(name)
    cards = CardsDraft(gpu, int(count), link_guess(gpu), described=described)
    return [NodeDraft(f"{name}-{i}", (cards,), site) for i in range(num_nodes)]


def _accelerator(
    document: Document, keypath: tuple[str | int, ...], resources: Any, notes: list[str]
) -> tuple[tuple[str | int, ...], str]:
    """Find the accelerators of a task as NAME:COUNT, and where they stand."""
    given: Any = resources.get("accelerators") if isinstance(resources, dict) else None
    several = len(given) if isinstance(given, list | dict) else 0
    if isinstance(given, list) and given:
        keypath, given = (*keypath, 0), given[0]
    if isinstance(given, dict) and given:
        name, count = next(iter(given.items()))
        given = name if count is None else f"{name}:{count}"
    if not isinstance(given, str):
        _fail(
            document,
            keypath,
            "the task names no GPUs: resources.accelerators, for example H100:8, is needed (an "
            "instance_type alone does not say them)",
        )
    if several > 1:
        notes.append(
            f"{document.locate(keypath)}: of {several} accelerators the first is taken: "
            f"{given[:64]}"
        )
    return keypath, given


def _short(option: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in option.items())[:120]


def _fail(document: Document, keypath: tuple[str | int, ...], message: str) -> NoReturn:
    key = ".".join(map(str, keypath))
    raise ClusterError(f"{document.locate(keypath)}: {key + ': ' if key else ''}{message}")
