"""cluster.yaml: from the file to a `Cluster` in which every pair of nodes has a link."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.gpu_types import (
    check_inside_links,
    prices_that_nothing_counts,
    resolve_gpu_types,
)
from megatron_hetero.cluster.file.islands import (
    Island,
    islands_of,
    root_complexes_of_one_island,
)
from megatron_hetero.cluster.file.limits import TENSOR_PARALLEL_CLASSES, resolve_limits
from megatron_hetero.cluster.file.lines import capped, resolve_site_lines
from megatron_hetero.cluster.file.links import entry_of_sites, resolve_node_links
from megatron_hetero.cluster.file.nics import (
    capacity_of,
    nics_below_links,
    nics_of,
    with_nics,
)
from megatron_hetero.cluster.file.references import References
from megatron_hetero.cluster.file.schema import ClusterSection, NodeSection
from megatron_hetero.cluster.makers import DEFAULT_LIBRARY
from megatron_hetero.cluster.nics import Nics
from megatron_hetero.cluster.node_links import Link, NodePair
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.nvlink import with_collectives
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError, FileFormatError
from megatron_hetero.files import Document, content_hash, read_yaml, validate_document

_OF_MODELS = (".sh", ".bash", ".flags", ".args")


def _read(path: Path | str) -> Document:
    """Read the file; say so where it is another one of a job's."""
    swapped = (
        f"{path}:1: this is no cluster file, for it has no nodes: --cluster takes the machines, "
        "--model the training script, its flags or a config.json; are the two swapped?"
    )
    # YAML of a script fails to parse, and the user has most likely swapped two options.
    try:
        document = read_yaml(path)
    except FileFormatError as error:
        if Path(path).suffix in _OF_MODELS and Path(path).is_file():
            raise ClusterError(swapped) from error
        raise
    # JSON is YAML too, so a config.json parses, and lacks the keys of a cluster file.
    keys = document.data if isinstance(document.data, dict) else {}
    if Path(path).suffix in (*_OF_MODELS, ".json") and not {"nodes", "version"} & set(keys):
        raise ClusterError(swapped)
    return document


def load_cluster(path: Path | str) -> Cluster:
    """Read cluster.yaml.

    Raises:
        FileFormatError: the file is not well-formed.
        ClusterError: it breaks the schema, names what is not there, or leaves two nodes without a
            link; the message has file, line and key.
    """
    document = _read(path)
    file = validate_document(document, ClusterSection, ClusterError)
    references = References(
        document,
        nodes=tuple(n.name for n in file.nodes),
        sites=tuple(dict.fromkeys(n.site for n in file.nodes)),
    )
    # Names and GPU types first: all else refers to both.
    _check_unique_names(file.nodes, references)
    gpu_types = resolve_gpu_types(file, references)
    check_inside_links(file, gpu_types, references)
    islands, island_links = _islands(file, gpu_types, references)
    # Paths between machines, then the NICs and uplinks that limit paths.
    entries = entry_of_sites(file.links, references)
    links = resolve_node_links(file.links, islands, island_links, references)
    # Machine -> its NICs, for machines that describe several.
    nics = {
        section.name: found
        for place, section in enumerate(file.nodes)
        if (found := nics_of(place, section, references)) is not None
    }
    # Island -> what its machine sends to others, at most.
    uplinks = {i.name: capacity_of(i.section, nics.get(i.section.name)) for i in islands}
    doubts = (
        *nics_below_links(file.links, file.nodes, nics, references),
        *root_complexes_of_one_island(islands, references),
        *prices_that_nothing_counts(file, gpu_types, islands, references),
    )
    site_lines = resolve_site_lines(file.links, file.sites, entries, links, references)
    # Prices by the catalogue's name of a type, as nodes know it.
    gpu_prices = {gpu_types[name].name: g.price_per_hour for name, g in file.gpu_types.items()}
    return Cluster(
        nodes=tuple(
            _node(island, gpu_prices, uplinks[island.name], nics.get(island.section.name))
            for island in islands
        ),
        node_links=capped(with_nics(links, islands, nics), islands, site_lines, uplinks),
        limits=resolve_limits(file.limits, islands, references),
        source=str(path),
        prices_per_gb=_prices_per_gb(file, entries),
        site_lines=site_lines,
        doubts=doubts,
    )


def cluster_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of cluster.yaml, for editors."""
    schema = ClusterSection.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cluster"} | {
        key: value for key, value in schema.items() if key != "title"
    }


def cluster_hash(cluster: Cluster) -> str:
    """Hash (sha256) the content of a cluster, however its file is written.

    The order of keys, of nodes and of names in a limit does not count, nor does a unit ("25 Gb/s"
    is "3.125 GB/s"), nor whether a number came from the catalogue or from the file, nor limits that
    are not the file's (`plan --without`).
    """
    # The summary of links does not depend on how classes and pairs are written.
    limits, links = cluster.file_limits or cluster.limits, cluster.link_summary
    return content_hash(
        {
            "nodes": {n.name: _node_content(n) for n in cluster.nodes},
            # Links that most pairs of a pair of sites have, and those that are unlike.
            "site_links": _links_content(links.usual),
            "links": _links_content(links.others),
            "limits": {
                "max_tensor_parallel": limits.max_tensor_parallel,
                "max_pipeline_parallel": limits.max_pipeline_parallel,
                "num_replicas": limits.num_replicas,
                "idle": sorted(limits.idle_devices),
                "first_stage": sorted(limits.first_stage_nodes),
                "last_stage": sorted(limits.last_stage_nodes),
                "no_tensor_parallel_across": sorted(limits.no_tensor_parallel_across),
                "no_data_parallel_across_sites": limits.no_data_parallel_across_sites,
                "memory_reserve_bytes": limits.memory_reserve_bytes,
                # Keys that came later are left out where they say nothing: older hashes stay.
                **_given(
                    max_price_per_hour=limits.max_price_per_hour,
                    as_given=sorted(limits.as_given) or None,
                    library=limits.library,
                ),
            },
            **_given(
                prices_per_gb={f"{a} {b}": p for (a, b), p in cluster.prices_per_gb.items()},
                lines=_lines_content(cluster),
            ),
        }
    )


def _given(**values: Any) -> dict[str, Any]:
    """Keep the values that say something: a file without prices keeps the hash that it has always
    had."""
    return {name: value for name, value in values.items() if value not in (None, {})}


def _node_content(node: Node) -> dict[str, Any]:
    # Numbers, not the name alone: a file may correct the catalogue's.
    gpu = node.gpu_type
    return {
        "gpu": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "memory_bytes_per_s": float(gpu.memory_bytes_per_s),
        "peak_flops": dict(gpu.peak_flops),
        "compute_capability": gpu.compute_capability,
        "num_gpus": node.num_gpus,
        "site": node.site,
        "host": node.host,
        "link": _link_content(node.link),
        **_given(
            library=None if gpu.library == DEFAULT_LIBRARY else gpu.library,
            price_per_hour=node.price_per_hour,
            gpu_price_per_hour=node.gpu_price_per_hour,
            gpu_indices=list(node.gpu_indices) or None,
            root_complex_bytes_per_s=_finite(node.root_complex_bytes_per_s),
            uplink_bytes_per_s=_finite(node.uplink_bytes_per_s),
            nics=node.nics and [float(node.nics.bytes_per_s), list(node.nics.near)],
        ),
    }


def _finite(bytes_per_s: float) -> float | None:
    return None if bytes_per_s == inf else bytes_per_s


def _links_content(links: Mapping[tuple[str, str], Link]) -> dict[str, list[Any]]:
    return {f"{a} {b}": _link_content(link) for (a, b), link in links.items()}


def _lines_content(cluster: Cluster) -> dict[str, list[Any]]:
    return {
        f"{a} {b}": [[line.name, float(line.bytes_per_s)] for line in lines]
        for (a, b), lines in cluster.site_lines.items()
    }


def _link_content(link: Link) -> list[Any]:
    # Terms that a link lacks leave the list as short as it was before these existed.
    jitter = [float(link.jitter_s)] if link.jitter_s else []
    terms = _given(
        reduce_bytes_per_s=None if link.reduce_bytes_per_s == inf else link.reduce_bytes_per_s,
        incast=link.incast and [link.incast.num_senders, link.incast.slowdown],
        groups=[[size, float(speed)] for size, speed in link.group_bytes_per_s] or None,
        nic_bytes_per_s=_finite(link.nic_bytes_per_s),
    )
    return [float(link.bytes_per_s), float(link.latency_s), *jitter, *([terms] if terms else [])]


def _check_unique_names(nodes: tuple[NodeSection, ...], references: References) -> None:
    # Names that tell two nodes apart by case alone would be one host.
    first_names: dict[str, int] = {}
    first_hosts: dict[str, int] = {}
    for i, node in enumerate(nodes):
        keypath = ("nodes", i, "name")
        if node.name in TENSOR_PARALLEL_CLASSES:
            references.fail(
                keypath,
                f'a node cannot be called "{node.name}", which is a class of '
                "limits.no_tensor_parallel_across; rename it",
            )
        if (first := first_names.setdefault(node.name.casefold(), i)) != i:
            references.fail(
                keypath, f'"{node.name}" is also the name of nodes[{first}]; rename one of them'
            )
        # Without `host` the name is the host.
        host = node.host or node.name
        if (first := first_hosts.setdefault(host.casefold(), i)) != i:
            references.fail(
                ("nodes", i, "host"),
                f'nodes[{first}] is on host "{host}" too; a machine with cards of several types '
                "is one node with gpus: [{type: ..., count: ...}, ...], in the order of its bus",
            )


def _islands(
    file: ClusterSection, gpu_types: Mapping[str, GpuType], references: References
) -> tuple[list[Island], dict[NodePair, Link]]:
    """Build the islands of all machines, and the links between islands of the same machine."""
    islands: list[Island] = []
    links: dict[NodePair, Link] = {}
    for i, section in enumerate(file.nodes):
        # A machine's section may make one island, which is the machine, or several.
        own, between = islands_of(i, section, gpu_types, file.links, references)
        islands += own
        links |= between
    return islands, links


def _node(
    island: Island, gpu_prices: Mapping[str, float | None], uplink: float, nics: Nics | None
) -> Node:
    section, gpu = island.section, island.gpu
    is_whole = island.name == section.name
    return Node(
        name=island.name,
        gpu_type=gpu,
        num_gpus=len(island.indices),
        site=section.site,
        host=section.host or section.name,
        # A single GPU has no neighbour in its node; its own memory stands in.
        link=with_collectives(island.link, gpu.name)
        if island.link
        else Link(gpu.memory_bytes_per_s, 0.0),
        price_per_hour=section.price_per_hour,
        gpu_price_per_hour=gpu_prices.get(gpu.name),
        gpu_indices=() if is_whole else island.indices,
        uplink_bytes_per_s=uplink,
        nics=nics,
        # Only islands have a root complex between them; equal cards have their link.
        root_complex_bytes_per_s=section.root_complex or inf if not is_whole else inf,
    )


def _prices_per_gb(
    file: ClusterSection, entries: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], float]:
    """Return the prices of traffic between sites, for both orders of each pair with a price."""
    prices = {}
    # Site pairs in both orders -> the entry of `between_sites` that counts for the pair.
    for sites, index in entries.items():
        price = file.links.between_sites[index].price_per_gb
        if price is not None:
            prices[sites] = price
    return prices
