"""cluster.yaml: from the file to a `Cluster` in which every pair of nodes has a link."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import TENSOR_PARALLEL_CLASSES, resolve_limits
from megatron_hetero.cluster.links import entry_of_sites, resolve_link, resolve_node_links
from megatron_hetero.cluster.references import References
from megatron_hetero.cluster.schema import ClusterSection, GpuSection, LinkSection, NodeSection
from megatron_hetero.cluster.spec import Cluster, GpuType, Link, Node
from megatron_hetero.errors import ClusterError, UnsupportedError
from megatron_hetero.files import content_hash, near_names, read_yaml, validate_document


def load_cluster(path: Path | str) -> Cluster:
    """Read cluster.yaml.

    Raises:
        FileFormatError: the file is not well-formed.
        ClusterError: it breaks the schema, names what is not there, or leaves two nodes without a
            link; the message has file, line and key.
        UnsupportedError: two nodes are on one host.
    """
    document = read_yaml(path)
    file = validate_document(document, ClusterSection, ClusterError)
    references = References(
        document,
        nodes=tuple(n.name for n in file.nodes),
        sites=tuple(dict.fromkeys(n.site for n in file.nodes)),
    )
    _check_unique_names(file.nodes, references)
    gpu_types = _gpu_types(file, references)
    inside_links = _inside_links(file, gpu_types, references)
    _check_inside_links(file, gpu_types, inside_links, references)
    gpu_prices = {gpu_types[name].name: g.price_per_hour for name, g in file.gpu_types.items()}
    return Cluster(
        nodes=tuple(
            _node(section, gpu_types[section.gpu], inside_links, gpu_prices)
            for section in file.nodes
        ),
        node_links=resolve_node_links(file.links, file.nodes, references),
        limits=resolve_limits(file.limits, {n.name: n.count for n in file.nodes}, references),
        source=str(path),
        prices_per_gb=_prices_per_gb(file, references),
    )


def cluster_json_schema() -> dict[str, Any]:
    """JSON Schema of cluster.yaml, for editors."""
    schema = ClusterSection.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cluster"} | {
        key: value for key, value in schema.items() if key != "title"
    }


def cluster_hash(cluster: Cluster) -> str:
    """sha256 of what the cluster is, however its file is written.

    The order of keys, of nodes and of names in a limit does not count, nor does a unit ("25 Gb/s"
    is "3.125 GB/s"), nor whether a number came from the catalogue or from the file.
    """
    limits, links = cluster.limits, cluster.link_summary
    return content_hash(
        {
            "nodes": {n.name: _node_content(n) for n in cluster.nodes},
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
                **_given(
                    max_price_per_hour=limits.max_price_per_hour,
                    as_given=sorted(limits.as_given) or None,
                ),
            },
            **_given(prices_per_gb={f"{a} {b}": p for (a, b), p in cluster.prices_per_gb.items()}),
        }
    )


def _given(**values: Any) -> dict[str, Any]:
    """Those that say something: a file without prices keeps the hash that it has always had."""
    return {name: value for name, value in values.items() if value not in (None, {})}


def _node_content(node: Node) -> dict[str, Any]:
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
        **_given(price_per_hour=node.price_per_hour, gpu_price_per_hour=node.gpu_price_per_hour),
    }


def _links_content(links: Mapping[tuple[str, str], Link]) -> dict[str, list[Any]]:
    return {f"{a} {b}": _link_content(link) for (a, b), link in links.items()}


def _link_content(link: Link) -> list[Any]:
    jitter = [float(link.jitter_s)] if link.jitter_s else []
    terms = _given(
        reduce_bytes_per_s=None if link.reduce_bytes_per_s == inf else link.reduce_bytes_per_s,
        incast=link.incast and [link.incast.num_senders, link.incast.slowdown],
    )
    return [float(link.bytes_per_s), float(link.latency_s), *jitter, *([terms] if terms else [])]


def _check_unique_names(nodes: tuple[NodeSection, ...], references: References) -> None:
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
        host = node.host or node.name
        if (first := first_hosts.setdefault(host.casefold(), i)) != i:
            raise UnsupportedError(
                f"{references.document.locate(['nodes', i, 'host'])}: nodes[{i}] and "
                f'nodes[{first}] are on one host, "{host}"; a machine with unlike GPUs is not '
                "supported yet: describe the GPUs of one kind and leave the others out"
            )


def _gpu_types(file: ClusterSection, references: References) -> dict[str, GpuType]:
    """Every GPU type that the file defines or uses, by the name that the file gives it."""
    types = {
        name: _defined_gpu_type(name, section, references)
        for name, section in file.gpu_types.items()
    }
    uses: list[tuple[str, tuple[str | int, ...]]] = [
        *((node.gpu, ("nodes", i, "gpu")) for i, node in enumerate(file.nodes)),
        *((name, ("links", "inside_node", name)) for name in file.links.inside_node),
    ]
    for name, keypath in uses:
        if name in types:
            continue
        try:
            types[name] = gpu_type(name)
        except ClusterError as error:
            own = near_names(name, file.gpu_types)
            references.fail(keypath, f"{error}{own and ', which this file does' + own}")
    # An alias of a type that the file corrects is that type, corrected.
    corrected: dict[str, GpuType] = {}
    for name in file.gpu_types:
        if types[name].name in corrected:
            references.fail(
                ("gpu_types", name), f"{types[name].name} is described above already; keep one"
            )
        corrected[types[name].name] = types[name]
    return {name: corrected.get(t.name, t) for name, t in types.items()}


def _defined_gpu_type(name: str, section: GpuSection, references: References) -> GpuType:
    """A new type, or a type of the catalogue with the numbers that the file corrects."""
    try:
        known = gpu_type(name)
    except ClusterError:
        known = None
    given = section.model_dump(exclude_unset=True)
    peaks: Mapping[str, float | None] = (
        known.peak_flops if known else dict.fromkeys(("bf16", "fp16", "fp32", "fp8"))
    )
    peaks = {precision: given.get(precision, peak) for precision, peak in peaks.items()}
    memory_bytes = section.memory or (known.memory_bytes if known else None)
    memory_bytes_per_s = section.memory_bandwidth or (known.memory_bytes_per_s if known else None)
    if memory_bytes is None or memory_bytes_per_s is None:
        missing = "memory" if memory_bytes is None else "memory_bandwidth"
        references.fail(
            ["gpu_types", name],
            f'the key "{missing}" is missing; a GPU that the catalogue does not have needs it',
        )
    if not any(peaks.values()):
        references.fail(["gpu_types", name], 'no peak is given; add for example "fp16: 65 TFLOPS"')
    return GpuType(
        name=known.name if known else name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flops=peaks,
        compute_capability=section.compute_capability
        or (known.compute_capability if known else None),
        source=references.document.locate(["gpu_types", name]),
    )


def _inside_links(
    file: ClusterSection, gpu_types: Mapping[str, GpuType], references: References
) -> dict[str, LinkSection]:
    """Links inside a node by the GPU's own name, whatever alias the file uses."""
    links: dict[str, LinkSection] = {}
    for name, section in file.links.inside_node.items():
        if gpu_types[name].name in links:
            references.fail(
                ["links", "inside_node", name],
                f"{gpu_types[name].name} has a link already, under another name; keep one",
            )
        links[gpu_types[name].name] = section
    return links


def _check_inside_links(
    file: ClusterSection,
    gpu_types: Mapping[str, GpuType],
    inside_links: Mapping[str, LinkSection],
    references: References,
) -> None:
    """Every node of several GPUs has a link between them; all that have none are named at once."""
    missing = {
        i: node
        for i, node in enumerate(file.nodes)
        if node.count > 1 and node.link is None and gpu_types[node.gpu].name not in inside_links
    }
    if not missing:
        return
    names = [f'"{node.name}"' for node in missing.values()]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    first = next(iter(missing))
    have = (
        f"node {shown} has {missing[first].count} GPUs"
        if len(names) == 1
        else f"nodes {shown} have several GPUs each"
    )
    keys = dict.fromkeys(f"links.inside_node.{node.gpu}" for node in missing.values())
    references.fail(
        ["nodes", first],
        f"{have} and no link between them; add {' and '.join(keys)} or a link of the node, for "
        "example link: {bandwidth: 20 GB/s, latency: 10 us}",
    )


def _node(
    section: NodeSection,
    gpu: GpuType,
    inside_links: Mapping[str, LinkSection],
    gpu_prices: Mapping[str, float | None],
) -> Node:
    link = section.link or inside_links.get(gpu.name)
    return Node(
        name=section.name,
        gpu_type=gpu,
        num_gpus=section.count,
        site=section.site,
        host=section.host or section.name,
        # A single GPU has no neighbour in its node; its own memory stands in.
        link=resolve_link(link) if link else Link(gpu.memory_bytes_per_s, 0.0),
        price_per_hour=section.price_per_hour,
        gpu_price_per_hour=gpu_prices.get(gpu.name),
    )


def _prices_per_gb(file: ClusterSection, references: References) -> dict[tuple[str, str], float]:
    """Both orders of the sites between which traffic costs."""
    prices = {}
    for sites, index in entry_of_sites(file.links, references).items():
        price = file.links.between_sites[index].price_per_gb
        if price is not None:
            prices[sites] = price
    return prices
