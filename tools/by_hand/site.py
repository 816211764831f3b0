"""The machines, read from cluster.yaml without megatron_hetero: links, and the lines they share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tools.by_hand.gpus import GPUS
from tools.by_hand.paper import NotByHandError

_SCALE = {
    "b/s": 1 / 8, "Kb/s": 1e3 / 8, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8,
    "B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "s": 1.0, "ms": 1e-3, "us": 1e-6,
    "GB": 1e9, "GiB": 2.0**30, "MiB": 2.0**20, "MB": 1e6,
}  # fmt: skip


def quantity(text: str) -> float:
    """Read `"2.5 Gb/s"` in bytes a second, `"9 ms"` in seconds, `"1 GiB"` in bytes."""
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]+)\s*", str(text))
    if found is None or found[2] not in _SCALE:
        raise ValueError(f"{text!r} has no unit known here")
    return float(found[1]) * _SCALE[found[2]]


@dataclass(frozen=True)
class Way:
    """From one node to another: bytes a second, seconds until a byte is there, late ones too, and
    the shared lines on the way with their capacities."""

    speed: float
    latency_s: float
    late_s: float
    lines: tuple[tuple[str, float], ...]


_NODE_KEYS = {"name", "gpu", "count", "site", "host", "uplink", "link", "price_per_hour"}
_LINK_KEYS = {"bandwidth", "latency", "jitter", "sites", "shared", "price_per_gb", "nodes"}


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a link that has no term without a formula here."""
    if more := entry.keys() - _LINK_KEYS:
        raise NotByHandError(f"a link has {', '.join(sorted(more))}")
    return entry


class Site:
    """A cluster file.

    Raises:
        NotByHandError: it says something of machines or links that has no formula here.
    """

    def __init__(self, path: Path) -> None:
        self._data: dict[str, Any] = YAML(typ="safe").load(path)
        self.nodes = {node["name"]: node for node in self._data["nodes"]}
        self._links = self._data.get("links", {})
        for node in self._data["nodes"]:
            if node["gpu"] not in GPUS:
                raise NotByHandError(f"no data sheet of {node['gpu']} is typed in tools/by_hand")
            if more := node.keys() - _NODE_KEYS:
                raise NotByHandError(f"node {node['name']} has {', '.join(sorted(more))}")
        reserve = self._data.get("limits", {}).get("memory_reserve")
        self.reserve = None if reserve is None else quantity(reserve)

    def gpu(self, device: str) -> str:
        """Return the name of a GPU's type."""
        return str(self.nodes[device.partition(":")[0]]["gpu"])

    def inside(self, node: str) -> tuple[float, float]:
        """Return bandwidth and latency between two GPUs of a node."""
        entry = self.nodes[node].get("link")
        entry = entry or self._links.get("inside_node", {}).get(self.nodes[node]["gpu"])
        if entry is None:
            raise NotByHandError(f"the file does not say how GPUs are joined inside {node}")
        entry = _plain(entry)
        return quantity(entry["bandwidth"]), quantity(entry["latency"])

    def between(self, here: str, there: str) -> Way:
        """Return the path from one node to another."""
        a, b = (self.nodes[name].get("site", "main") for name in (here, there))
        entry, lines = _plain(self._entry(here, there, a, b)), []
        uplink = self.nodes[here].get("uplink")
        if uplink:
            lines.append((f"uplink of {here} out", quantity(uplink)))
        if a != b:
            lines += self._site_lines(a, b)
        uplink = self.nodes[there].get("uplink")
        if uplink:
            lines.append((f"uplink of {there} in", quantity(uplink)))
        speed = min([quantity(entry["bandwidth"]), *(capacity for _, capacity in lines)])
        latency = quantity(entry["latency"])
        return Way(speed, latency, latency + quantity(entry.get("jitter", "0 s")), tuple(lines))

    def _entry(self, here: str, there: str, a: str, b: str) -> dict[str, Any]:
        for measured in self._links.get("measured", ()):
            if set(measured["nodes"]) == {here, there}:
                return dict(measured)
        if a == b:
            between = self._links["between_nodes"]
            return dict(between if "bandwidth" in between else between[a])
        return self._between_sites(a, b)

    def _between_sites(self, a: str, b: str) -> dict[str, Any]:
        found = [e for e in self._links["between_sites"] if {a, b} <= set(e["sites"])]
        return dict(min(found, key=lambda entry: len(entry["sites"])))

    def _site_lines(self, a: str, b: str) -> list[tuple[str, float]]:
        uplinks = {n: s.get("uplink") for n, s in (self._data.get("sites") or {}).items()}
        entry = self._between_sites(a, b)
        capacity = quantity(entry["bandwidth"])
        lines = [(f"uplink of site {a} out", quantity(uplinks[a]))] if uplinks.get(a) else []
        shared = entry.get("shared", "pair")
        if shared == "pair":
            lines.append((f"line {a} -> {b}", capacity))
        elif shared == "all":
            forth = entry["sites"].index(a) < entry["sites"].index(b)
            name = f"backbone {', '.join(entry['sites'])} ({'forth' if forth else 'back'})"
            lines.append((name, capacity))
        if uplinks.get(b):
            lines.append((f"uplink of site {b} in", quantity(uplinks[b])))
        return lines
