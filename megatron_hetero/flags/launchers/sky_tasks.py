"""A user's own SkyPilot task, whose machines and files a launch takes over (`launch --task`).

What the plan decides is the plan's: how many machines, how many GPUs of which kind, the command.
Everything else of the task goes into the written one. The folder of the launch is mounted beside
the user's `workdir`, in which the job runs as the task did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_hetero.cluster.inventory.skypilot import SkyTask, read_sky_task
from megatron_hetero.errors import UsageError, some_of

JOB_FOLDER = "~/megatron-hetero-job"
"""Folder of the launch's files on a machine whose working directory is the user's own."""

_CHOICES = ("any_of", "ordered")
_PLACES = ("infra", "cloud", "region", "zone")
_WRITTEN = ("name", "num_nodes", "resources", "run", "workdir", "file_mounts", "setup")
_NAME = re.compile(r"[A-Za-z_]\w{0,127}", re.ASCII)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_PLAIN = re.compile(r"~?[A-Za-z_/][\w./:@+-]*(?<!:)", re.ASCII)
_WORDS = frozenset(("y", "yes", "n", "no", "on", "off", "true", "false", "null"))
"""Plain words that YAML 1.1, which SkyPilot reads, does not take for text."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class CarriedTask:
    """The parts of a task that a launch takes over.

    `accelerator` is SkyPilot's name of the GPU, `count` how many a machine has. `resources` are
    without accelerators, and `secrets` names alone: their values are never written. `more` are the
    keys that the written file has no line of its own for.
    """

    path: Path
    accelerator: str
    count: int
    resources: Mapping[str, Any]
    workdir: str | Mapping[str, Any] | None
    file_mounts: Mapping[str, Any]
    envs: Mapping[str, Any]
    secrets: tuple[str, ...]
    setup: str | None
    more: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of_plan(cls, accelerator: str, count: int) -> Self:
        """Return the task that says nothing but which GPUs a machine has."""
        return cls(Path(), accelerator, count, {}, None, {}, {}, (), None, {})

    @property
    def passed(self) -> list[tuple[str, str]]:
        """Return (option, name) of the values that SkyPilot takes from its call's environment."""
        unset = [name for name, value in self.envs.items() if value is None]
        return [*(("--env", name) for name in unset), *(("--secret", s) for s in self.secrets)]


def read_carried_task(path: Path, folder: Path) -> CarriedTask:
    """Read a task for a launch.

    Args:
        path: of the task.
        folder: where SkyPilot would be called, from which paths of the task lead.
    Raises:
        FileFormatError: the file cannot be read, or is no YAML.
        ClusterError: it is no task with GPUs.
        UsageError: a path of the task leads nowhere, or a part has no form that SkyPilot reads.
    """
    task = read_sky_task(path)
    data = task.document.data
    # Mappings of the task, empty where it has none.
    sections = {key: _section(task, key) for key in ("file_mounts", "envs", "secrets")}
    paths = _TaskPaths(task, folder, sections["envs"])
    workdir: Any = data.get("workdir")
    # A folder, a repository of SkyPilot's form, or nothing.
    if isinstance(workdir, str):
        workdir = paths.absolute(("workdir",), workdir)
    elif not isinstance(workdir, dict | None):
        raise UsageError(f"{task.document.locate(('workdir',))}: workdir is no folder")
    setup: Any = data.get("setup")
    if not isinstance(setup, str | None):
        raise UsageError(f"{task.document.locate(('setup',))}: setup is no text of commands")
    resources, notes = _resources(task)
    # Names become words of commands, so that only names are taken.
    names = [*sections["envs"], *sections["secrets"]]
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        raise UsageError(f"{path}: {wrong[0][:40]!r} is no name of a variable")
    # Values that SkyPilot takes from the environment of its call.
    unset = [*sections["secrets"], *(k for k, v in sections["envs"].items() if v is None)]
    if unset:
        notes.append(f"{path}: start.sh takes {some_of(unset)} from the environment of its call")
    if "run" in data:
        notes.append(f"{path}: its run is not taken over: train.sh starts the plan")
    return CarriedTask(
        path,
        task.name,
        task.count,
        resources,
        workdir,
        {name: paths.mount(name, value) for name, value in sections["file_mounts"].items()},
        sections["envs"],
        tuple(sections["secrets"]),
        setup,
        {key: value for key, value in data.items() if key not in (*_WRITTEN, *sections)},
        tuple(notes),
    )


def resources_at(
    task: CarriedTask, infra: str | None, *, is_spot: bool, image: str | None
) -> dict[str, Any]:
    """Return the task's resources, in which the command line's own values win.

    Raises:
        UsageError: a place for a task that leaves a choice of places.
    """
    # The command line's values take the place of the task's, in every choice.
    won = ({"use_spot": True} if is_spot else {}) | ({"image_id": image} if image else {})
    resources = dict(task.resources)
    for choice in _CHOICES:
        if choice in resources:
            options = ({k: v for k, v in o.items() if k not in won} for o in resources[choice])
            resources[choice] = list(options)
    # One place cannot take the place of several.
    if infra is not None:
        if left := [key for key in _CHOICES if key in resources]:
            raise UsageError(
                f"--infra {infra}: {task.path} leaves a choice of places ({left[0]}); leave one out"
            )
        resources = {k: v for k, v in resources.items() if k not in _PLACES} | {"infra": infra}
    return resources | won


def yaml_block(data: Mapping[str, Any], indent: int) -> str:
    """Write a mapping in block style, each value on one line but for mappings inside."""
    lines: list[str] = []
    for key, value in data.items():
        head = f"{' ' * indent}{yaml_value(key)}:"
        # An empty mapping is written as {} on its line.
        if isinstance(value, dict) and value:
            lines += [head, yaml_block(value, indent + 2).removesuffix("\n")]
        else:
            lines.append(f"{head} {yaml_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def yaml_value(value: object) -> str:
    """Write a value on one line; YAML 1.1 and 1.2 read the text alike."""
    # Everything else as JSON, which YAML reads alike.
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)


def _resources(task: SkyTask) -> tuple[dict[str, Any], list[str]]:
    """Return the resources without accelerators, and notes on choices with other GPUs."""
    given: Mapping[str, Any] = task.document.data["resources"]
    resources = {key: value for key, value in given.items() if key != "accelerators"}
    notes: list[str] = []
    for choice in _CHOICES:
        options = resources.get(choice)
        if options is None:
            continue
        if not isinstance(options, list):
            where = task.document.locate(("resources", choice))
            raise UsageError(f"{where}: resources.{choice} is no list of choices")
        # Choices of other GPUs are not what the plan was made for.
        kept = [option for option in options if _has_planned(task, option)]
        if len(kept) < len(options):
            notes.append(
                f"{task.document.locate(('resources', choice))}: of {len(options)} choices "
                f"{len(options) - len(kept)} are left out, which have other GPUs than the plan"
            )
        stripped = [{k: v for k, v in o.items() if k != "accelerators"} for o in kept]
        # A single choice is no choice, and joins the resources.
        if len(stripped) > 1:
            resources[choice] = stripped
        else:
            del resources[choice]
            resources |= stripped[0] if stripped else {}
    return resources, notes


def _has_planned(task: SkyTask, option: object) -> bool:
    """Return whether a choice has the GPUs that the plan was made for, or names none."""
    if not isinstance(option, dict):
        return False
    given = option.get("accelerators")
    if given is None:
        return True
    # `A100:8`, a list of such names, or a mapping of names to counts.
    names = [given] if isinstance(given, str) else list(given)
    counts = given if isinstance(given, dict) else {}
    # Without a number SkyPilot takes a single GPU.
    wanted = {f"{task.name}:{task.count}"} | ({task.name} if task.count == 1 else set())
    words = {n if counts.get(n) is None else f"{n}:{counts[n]}" for n in map(str, names)}
    return bool(wanted & words)


def _section(task: SkyTask, key: str) -> Mapping[str, Any]:
    value = task.document.data.get(key)
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{task.document.locate((key,))}: {key} is no mapping")
    return value or {}


@dataclass(frozen=True)
class _TaskPaths:
    """Local paths of a task; the launch calls SkyPilot elsewhere, so relative ones become
    absolute."""

    task: SkyTask
    folder: Path
    envs: Mapping[str, Any]

    def absolute(self, keypath: Sequence[str | int], text: str) -> str:
        """Return a path that means the same from every folder.

        Raises:
            UsageError: it leads to nothing from the user's folder, or hangs on a variable without
                a value.
        """
        where = f"{self.task.document.locate(keypath)}: {'.'.join(map(str, keypath))}"
        unset = [n for n in _VARIABLE.findall(text) if not isinstance(self.envs.get(n), str | int)]
        if unset:
            raise UsageError(
                f"{where}: {text[:80]!r} hangs on {some_of(unset)}, which envs gives no value"
            )
        # Only judged with the values; SkyPilot itself replaces the variables.
        plain = _VARIABLE.sub(lambda found: str(self.envs[found[1]]), text)
        # Buckets and absolute paths mean the same everywhere.
        if _URI.match(plain) or plain.startswith(("/", "~")):
            return text
        if not (self.folder / plain).exists():
            raise UsageError(
                f"{where}: there is no {plain[:80]} in {self.folder}; SkyPilot takes paths from "
                "the folder in which it is called, so call launch where you call sky"
            )
        return str(self.folder / plain)

    def mount(self, name: str, value: object) -> object:
        """Return what is mounted at `name`: a path, a bucket, or a mapping with its `source`."""
        keypath = ("file_mounts", name)
        if isinstance(value, str):
            return self.absolute(keypath, value)
        source = value.get("source") if isinstance(value, dict) else None
        # A mapping may have its source in a list of paths.
        if isinstance(value, dict) and isinstance(source, str | list):
            return {**value, "source": self._sources((*keypath, "source"), source)}
        return value

    def _sources(self, keypath: tuple[str | int, ...], source: str | list[Any]) -> object:
        if isinstance(source, str):
            return self.absolute(keypath, source)
        return [self.absolute((*keypath, i), str(part)) for i, part in enumerate(source)]
