"""Every plan and layout that README, docs, examples and stories print.

Layouts are found by their grammar, plans by the `megatron-hetero plan` commands whose files are
here.  `tools/verify_printed.py` verifies them all; tests verify some.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.plan.plan import Layout

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "verified-plans.md"
MAX_RANKS = 40
MAX_MICRO_BATCHES = 64

_SHARES = r"(?:\(\d+(?::\d+)+\))?"
_STAGE = rf"tp\d+{_SHARES}(?:cp\d+{_SHARES})?:\d+"
_REPLICA = rf"{_STAGE}(?:\s*,\s*{_STAGE})*\s*@\s*\d+(?:x\d+)?"
# A stage that another one precedes is the end of a layout with a form that is not looked for.
_LAYOUT = re.compile(rf"(?<![,\w])(?<!, ){_REPLICA}(?:\s*\\?\|\s*{_REPLICA})*(`, twice)?")
_COMMAND = re.compile(r"^(?:\$ )?megatron-hetero (plan (?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Printed:
    """A plan and where it is printed.

    `layout` is None for a plan that `command` makes.  `cut` says what of a larger one is verified.
    """

    places: tuple[str, ...]
    layout: str | None = None
    command: str | None = None
    cut: str = ""

    @property
    def name(self) -> str:
        return self.layout or f"megatron-hetero {self.command}"


def pages() -> list[Path]:
    """Return README, the pages of `docs/` and the files of `examples/`."""
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    examples = (p for p in sorted((ROOT / "examples").rglob("*")) if p.is_file())
    return [path for path in (*texts, *examples) if path != PAGE]


def printed_layouts(most_micro_batches: int = MAX_MICRO_BATCHES) -> list[Printed]:
    """Return every layout once, as it is verified, smallest first.

    Args:
        most_micro_batches: of a replica; of more, all replicas have an equal part.
    """
    found: dict[str, set[str]] = {}
    for page in pages():
        for layout in layouts_of(page.read_text(errors="replace")):
            found.setdefault(format_layout(layout), set()).add(str(page.relative_to(ROOT)))
    made = [
        _as_verified(layout, tuple(sorted(places)), most_micro_batches)
        for layout, places in found.items()
    ]
    return sorted(made, key=lambda p: (parse_layout(str(p.layout)).num_devices, str(p.layout)))


def layouts_of(text: str) -> Iterator[Layout]:
    """Find the layouts in a text; in the cell of a table `|` is written as `\\|`."""
    for found in _LAYOUT.finditer(text):
        line = found[0].removesuffix("`, twice").replace("\\|", "|")
        yield parse_layout(f"{line} | {line}" if found[1] else line)


def printed_commands() -> list[Printed]:
    """Return the commands that make plans from files that are here, and one for each other
    example."""
    found: dict[str, set[str]] = {}
    for page in pages():
        for match in _COMMAND.finditer(page.read_text(errors="replace")):
            words = shlex.split(match[1].replace("\\\n", " "), comments=True)
            named = [w for w in words if w.endswith((".yaml", ".sh", ".flags", "config.json"))]
            if "..." not in words and all((ROOT / word).is_file() for word in named):
                command = shlex.join(words)
                found.setdefault(command, set()).add(str(page.relative_to(ROOT)))
    for folder in sorted((ROOT / "examples").iterdir()):
        models = [p for p in folder.iterdir() if p.suffix in (".sh", ".flags")]
        name = str(folder.relative_to(ROOT))
        if models and not any(f"{name}/" in command for command in found):
            model = f"{name}/{models[0].name}"
            found[f"plan --cluster {name}/cluster.yaml --model {model} -o plan.json"] = {name}
    return [Printed(tuple(sorted(places)), command=c) for c, places in found.items()]


def make_plan(printed: Printed, folder: Path) -> tuple[Path, Printed]:
    """Run a command of `printed_commands` in `folder`, with the examples beside it.

    Returns:
        The plan's file, and `printed` with what was cut: nodes that are repeated, of a cluster of
        more than `MAX_RANKS` GPUs.
    Raises:
        RuntimeError: the command failed.
    """
    if not (folder / "examples").exists():
        shutil.copytree(ROOT / "examples", folder / "examples")
    words = shlex.split(str(printed.command))
    cluster = folder / words[words.index("--cluster") + 1]
    cut = _cut_cluster(cluster)
    if "-o" not in words:
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = ["-o", "unnamed.json"]
    output = folder / words[words.index("-o") + 1]
    command = [sys.executable, "-m", "megatron_hetero", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr or done.stdout}")
    return output, replace(printed, cut=cut)


def _cut_cluster(path: Path) -> str:
    yaml = YAML(typ="safe", pure=True)
    data = yaml.load(path.read_text())
    nodes = data["nodes"]
    if sum(map(_num_gpus, nodes)) <= MAX_RANKS:
        return ""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in nodes:
        kind = str(node.get("gpu", node.get("gpus"))), str(node.get("site", ""))
        kinds.setdefault(kind, []).append(node)
    longest = max(map(len, kinds.values()))
    in_turn = [group[i] for i in range(longest) for group in kinds.values() if i < len(group)]
    kept: list[object] = []
    total = 0
    for node in in_turn:
        if total + _num_gpus(node) <= MAX_RANKS:
            kept.append(node["name"])
            total += _num_gpus(node)
    data["nodes"] = [node for node in nodes if node["name"] in kept]
    with path.open("w") as stream:
        yaml.dump(data, stream)
    return f"{len(kept)} of {len(nodes)} nodes, {total} GPUs"


def _num_gpus(node: Mapping[str, Any]) -> int:
    """Count the cards of an entry of `nodes`, equal ones or a list of unlike ones."""
    return sum(int(entry["count"]) for entry in node.get("gpus", (node,)))


def _as_verified(line: str, places: Sequence[str], most_micro_batches: int) -> Printed:
    layout = parse_layout(line)
    replicas, cuts = list(layout.replicas), []
    while sum(r.num_devices for r in replicas) > MAX_RANKS and len(set(replicas)) < len(replicas):
        last = next(r for r in reversed(replicas) if replicas.count(r) > 1)
        replicas.pop(len(replicas) - 1 - replicas[::-1].index(last))
    if len(replicas) < len(layout.replicas):
        cuts.append(f"{len(replicas)} of {len(layout.replicas)} replicas")
    most = max(r.num_micro_batches for r in replicas)
    common = gcd(*(r.num_micro_batches for r in replicas))
    divisors = [k for k in range(1, common + 1) if common % k == 0]
    fewer = next((k for k in divisors if most // k <= most_micro_batches), divisors[-1])
    if fewer > 1:
        replicas = [replace(r, num_micro_batches=r.num_micro_batches // fewer) for r in replicas]
        cuts.append(f"1/{fewer} of the micro-batches")
    made = replace(layout, replicas=tuple(replicas))
    return Printed(tuple(places), layout=format_layout(made), cut=", ".join(cuts))
