"""Nodes from the output of `kubectl get nodes -o json`.

Types and sizes are the labels of NVIDIA's GPU feature discovery (`nvidia.com/gpu.product`,
`.count`, `.memory`), of AMD's node labeller (`amd.com/gpu.product-name`, `.vram`) and of GKE; the
number of GPUs is what the device plugin offers, but for shared GPUs, which it offers several times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.gpu_names import part_of_card
from megatron_hetero.cluster.inventory.card_names import CardNames, num_taken
from megatron_hetero.cluster.inventory.draft import (
    CardsDraft,
    Inventory,
    NodeDraft,
    link_guess,
)
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import Document, read_json

_REGION = "topology.kubernetes.io/region"
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi", "gpu.intel.com/i915")
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "gpu.intel.com/product",
)
_USUAL = {
    "nvidia-tesla-a100": "A100-40GB",
    "nvidia-tesla-v100": "V100-16GB",
    "nvidia-h100-80gb": "H100-80GB",
    "nvidia-h100-mega-80gb": "H100-80GB",
    "nvidia-rtx-pro-6000": "RTX-PRO-6000-Server",
}
"""GKE's names (`cloud.google.com/gke-accelerator`) that could be several GPUs elsewhere."""
_TIMES = ("nvidia.com/gpu.replicas", "cloud.google.com/gke-max-shared-clients-per-gpu")
_COUNT = re.compile(r"[0-9]{1,4}", re.ASCII)
_SIZE = re.compile(r"(?P<number>[0-9]{1,7})(?P<unit>[GM]?)i?B?", re.ASCII)


def nodes_from_kubernetes(path: Path, means: Mapping[str, str]) -> Inventory:
    """Read the nodes with GPUs from a file with the output of `kubectl get nodes -o json`.

    Nodes that are cordoned, not ready or cut into parts (MIG) are left out.  Regions are sites
    where there are several.

    Args:
        means: the catalogue's GPU behind names that could be several.
    Raises:
        FileFormatError: the file cannot be read, or is no JSON.
        ClusterError: it is no list of nodes, or a node says something impossible; with file, line
            and key.
    """
    document = read_json(path)
    nodes: list[NodeDraft] = []
    notes: list[str] = []
    names = CardNames(means, _USUAL)
    items = _items(document)
    for keypath, item in items:
        node = _node(document, keypath, item, names, notes)
        if node is not None:
            nodes.append(node)
    if not nodes:
        raise ClusterError(
            f"{path}:1: no node offers GPUs that can be used; {'; '.join(notes[:5])}"
            if notes
            else f"{path}:1: no node offers GPUs ({', '.join(_RESOURCES)} in status.allocatable); "
            "does the device plugin run?"
        )
    # One region is one site, which needs no name.
    if len({node.site for node in nodes}) == 1:
        nodes = [replace(node, site="main") for node in nodes]
    left = len(items) - len(nodes)
    notes.append(num_taken(len(nodes)) + (f", {left} left out" if left else ""))
    return Inventory(tuple(nodes), (*names.check(), *notes))


def _items(document: Document) -> list[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    data = document.data
    # `kubectl get node NAME -o json` prints the node alone.
    if isinstance(data, dict) and data.get("kind") == "Node":
        return [((), data)]
    items = data.get("items") if isinstance(data, dict) else None
    if not isinstance(items, list):
        raise ClusterError(
            f"{document.locate(())}: this is not what `kubectl get nodes -o json` prints: there is "
            'no list "items"'
        )
    found: list[tuple[tuple[str | int, ...], Mapping[str, Any]]] = []
    for i, item in enumerate(items):
        if not isinstance(item, dict) or item.get("kind", "Node") != "Node":
            raise ClusterError(f"{document.locate(('items', i))}: items[{i}] is not a node")
        found.append((("items", i), item))
    return found


def _node(
    document: Document,
    keypath: tuple[str | int, ...],
    item: Mapping[str, Any],
    names: CardNames,
    notes: list[str],
) -> NodeDraft | None:
    # Name and labels of the node, and the GPUs that it offers.
    where = document.locate((*keypath, "metadata"))
    name = _text(_section(item, "metadata"), "name")
    try:
        check_host_name(name)
    except ValueError as error:
        raise ClusterError(f"{where}: metadata.name: {error}") from None
    labels = _section(_section(item, "metadata"), "labels")
    offered = _section(_section(item, "status"), "allocatable")
    # The first kind of GPU that the node offers now; "0" means a plugin without GPUs.
    resource = next((r for r in _RESOURCES if _text(offered, r) not in ("", "0")), None)
    # Labels name the card, the most exact one first.
    product = next(filter(None, (_text(labels, key) for key in _PRODUCTS)), None)
    # Leave out nodes without usable GPUs, with the reason.
    if resource is None:
        if product is not None:
            notes.append(f"{name} is left out: it has {product}, but offers none of it")
        return None
    if why := _unusable(item):
        notes.append(f"{name} is left out: {why}")
        return None
    if product is None:
        raise ClusterError(
            f"{where}: node {name} offers {resource}, but no label says which GPUs these are "
            f"({', '.join(_PRODUCTS)}); run GPU feature discovery, or write its node by hand"
        )
    # GKE names the part beside the card, others in the card's own name.
    part = _text(labels, "cloud.google.com/gke-gpu-partition-size")
    if part or "MIG" in product or part_of_card(product):
        of_card = f"{part} of {product}" if part else product
        notes.append(f"{name} is left out: its GPUs are cut into parts ({of_card})")
        return None
    count = _text(offered, resource)
    # Shared GPUs are offered many times.
    if (times := _times_offered(labels, product)) != "1":
        count = _real_count(labels, count, times)
        notes.append(f"{name} shares its GPUs in time; it is taken with its {count} real ones")
    if not _COUNT.fullmatch(count) or not int(count):
        raise ClusterError(f"{where}: node {name}: {count[:40]!r} is not a number of GPUs")
    # The card by its product label, the site by its region.
    gpu, described = names.find(
        f"{where}: node {name}", product.removesuffix("-SHARED"), _memory_bytes(labels)
    )
    # Regions become host names, as sites are written.
    site = re.sub(r"[^A-Za-z0-9-]", "-", _text(labels, _REGION)).strip("-")[:63] or "main"
    cards = CardsDraft(gpu, int(count), link_guess(gpu), described=described)
    return NodeDraft(name, (cards,), site)


def _times_offered(labels: Mapping[str, Any], product: str) -> str:
    """Return how many times a node offers each of its GPUs; empty where no label says how often a
    shared one is."""
    times = next((t for key in _TIMES if (t := _text(labels, key)) not in ("", "0", "1")), "")
    return times or ("" if product.endswith("-SHARED") else "1")


def _real_count(labels: Mapping[str, Any], offered: str, times: str) -> str:
    """Return the number of GPUs of a node that offers each several times."""
    counted = _text(labels, "nvidia.com/gpu.count")
    if counted or not (_COUNT.fullmatch(offered) and _COUNT.fullmatch(times) and int(times)):
        return counted
    return str(int(offered) // int(times))


def _unusable(item: Mapping[str, Any]) -> str:
    if _section(item, "spec").get("unschedulable") is True:
        return "it is cordoned"
    # A node without the condition is taken for ready.
    conditions = _section(item, "status").get("conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        if isinstance(condition, dict) and condition.get("type") == "Ready":
            return "" if condition.get("status") == "True" else "it is not ready"
    return ""


def _memory_bytes(labels: Mapping[str, Any]) -> int | None:
    """Read the memory of one GPU: in MiB by NVIDIA's label, with a unit by AMD's."""
    for key in ("nvidia.com/gpu.memory", "amd.com/gpu.vram"):
        size = _SIZE.fullmatch(_text(labels, key))
        if size is not None:
            return int(size["number"]) << (30 if size["unit"] == "G" else 20)
    return None


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value[:256] if isinstance(value, str) else ""
