"""Nodes from SkyPilot task files: `num_nodes` machines with `resources.accelerators` each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_hetero.cluster.file.schema import MAX_NODES
from megatron_hetero.cluster.inventory.card_names import CardNames, num_taken
from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NodeDraft,
    link_guess,
)
from megatron_hetero.errors import ClusterError, some_of
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
_OF_MACHINES = ("name", "num_nodes", "resources", "accelerators", "run")
"""Keys that a cluster file has a place for, and the command, which `launch` writes itself."""


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
    # Names of nodes that tasks before have.
    taken: set[str] = set()
    tasks = [read_sky_task(path) for path in paths]
    sites = {task.site for task in tasks}
    # One kind of machine for each task; sites only where the tasks have several.
    for number, task in enumerate(tasks):
        made = _nodes(task, number, task.site if len(sites) > 1 else "main", names, taken)
        nodes += made
        notes += task.notes
        if task.left:
            # What a cluster file has no place for, `launch` takes from the task itself.
            is_spot = " (spot: the cloud may take them away)" if task.is_spot else ""
            notes.append(
                f"{task.document.path}: of its machines{is_spot} a cluster file has no place for "
                f"{some_of(task.left)}; `launch --for skypilot` takes them over with --task "
                f"{made[0].cards[0].gpu}={task.document.path}"
            )
    return Inventory(tuple(nodes), (*names.check(), *notes, num_taken(len(nodes))))


@dataclass(frozen=True)
class SkyTask:
    """A task with the choice among its resources made.

    `keypath` leads to the accelerators; `name` and `count` are SkyPilot's own of them.
    `infra` is CLOUD/REGION/ZONE as far as the task says so.  `notes` are the choices made.
    """

    document: Document
    keypath: tuple[str | int, ...]
    name: str
    count: int
    infra: str
    is_spot: bool
    notes: tuple[str, ...]

    @property
    def site(self) -> str:
        """Return the name of a site for machines that are rented there."""
        return re.sub(r"[^A-Za-z0-9-]+", "-", self.infra).strip("-")[:63].strip("-") or "main"

    @property
    def left(self) -> list[str]:
        """Return the keys of the task that say more than which machines they are."""
        resources = self.document.data["resources"]
        keys = [*resources, *self.document.data]
        return [str(key)[:40] for key in keys if key not in _OF_MACHINES]


def read_sky_task(path: Path) -> SkyTask:
    """Read a task, and choose the first of its accelerators.

    Raises:
        FileFormatError: the file cannot be read, or is no YAML.
        ClusterError: the task has no accelerators, or no whole number of them.
    """
    document, notes = read_yaml(path), list[str]()
    if not isinstance(document.data, dict):
        _fail(document, (), "this is not a SkyPilot task: a mapping with `resources`")
    keypath: tuple[str | int, ...] = ("resources",)
    resources: Any = document.data.get("resources")
    # A choice of resources: the first option stands over the common keys.
    for choice in ("any_of", "ordered"):
        options = resources.get(choice) if isinstance(resources, dict) else None
        if isinstance(options, list) and options and isinstance(options[0], dict):
            # Messages point at the accelerators, which may stand in the option.
            keypath = (*keypath, choice, 0) if "accelerators" in options[0] else keypath
            resources = {**{k: v for k, v in resources.items() if k != choice}, **options[0]}
            if len(options) > 1:
                notes.append(
                    f"{document.locate(('resources', choice))}: of {len(options)} choices the "
                    f"first is taken: {_short(options[0])}"
                )
    keypath, accelerator = _accelerator(document, (*keypath, "accelerators"), resources, notes)
    # Newer tasks have `infra`, older ones its parts.
    words = [resources.get(key) for key in ("infra", "cloud", "region", "zone")]
    infra = "/".join(word for word in words if isinstance(word, str))[:120]
    # A count such as 0.5 is read here, to be refused below.
    found = _ACCELERATOR.fullmatch(accelerator)
    count = "1" if found is None else found["count"] or "1"
    if found is None or not count.isdecimal() or int(count) < 1:
        _fail(
            document,
            keypath,
            f"{accelerator[:80]!r} is not NAME:COUNT with whole GPUs, as H100:8",
        )
    is_spot = resources.get("use_spot") is True
    return SkyTask(document, keypath, found["name"], int(count), infra, is_spot, tuple(notes))


def _nodes(
    task: SkyTask, number: int, site: str, names: CardNames, taken: set[str]
) -> list[NodeDraft]:
    document, data = task.document, task.document.data
    # A whole number of nodes.
    num_nodes = data.get("num_nodes")
    num_nodes = 1 if num_nodes is None else num_nodes
    # `True` is an integer to Python.
    is_number = isinstance(num_nodes, int) and not isinstance(num_nodes, bool)
    if not is_number or not 1 <= num_nodes <= MAX_NODES:
        hint = (
            ": SkyPilot fills in no variable there; write the number"
            if isinstance(num_nodes, str) and "$" in num_nodes
            else ""
        )
        _fail(
            document,
            ("num_nodes",),
            f"{repr(num_nodes)[:40]} is not a number of nodes, 1 to {MAX_NODES}{hint}",
        )
    where = document.locate(task.keypath)
    gpu, described = names.find(where, task.name)
    # A name that no other task has.
    name = data.get("name")
    name = name if isinstance(name, str) else gpu
    name = re.sub(r"[^A-Za-z0-9-]", "-", name).strip("-")[:48] or "node"
    if name in taken:
        name = f"{name}-{number}"
    taken.add(name)
    cards = CardsDraft(gpu, task.count, link_guess(gpu), described=described)
    return [NodeDraft(f"{name}-{i}", (cards,), site) for i in range(num_nodes)]


def _accelerator(
    document: Document, keypath: tuple[str | int, ...], resources: Any, notes: list[str]
) -> tuple[tuple[str | int, ...], str]:
    """Find the accelerators of a task as NAME:COUNT, and where they stand."""
    given: Any = resources.get("accelerators") if isinstance(resources, dict) else None
    several = len(given) if isinstance(given, list | dict) else 0
    if isinstance(given, list) and given:
        # A list names choices, a mapping names with counts.
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
