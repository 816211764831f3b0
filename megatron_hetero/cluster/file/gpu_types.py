"""GPU types of cluster.yaml and the links inside nodes of each: the file's or the catalogue's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_hetero.cluster.catalogue import gpu_type, usual_launch_s
from megatron_hetero.cluster.doubt import Doubt
from megatron_hetero.cluster.file.islands import Island
from megatron_hetero.cluster.file.references import References
from megatron_hetero.cluster.file.schema import ClusterSection, GpuSection
from megatron_hetero.cluster.makers import LIBRARIES, Library, library_of_name
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.errors import ClusterError, some_of
from megatron_hetero.files import near_names


def resolve_gpu_types(file: ClusterSection, references: References) -> dict[str, GpuType]:
    """Return every GPU type that the file defines or uses, by name in the file.

    Raises:
        ClusterError: a name is neither in the file nor in the catalogue, two names describe one
            type, or a defined type lacks its memory or every peak.
    """
    # Types of the file's own, then every name that the file uses anywhere.
    types = {
        name: _defined_gpu_type(name, section, references)
        for name, section in file.gpu_types.items()
    }
    uses: list[tuple[str, tuple[str | int, ...]]] = [
        *_uses_in_nodes(file),
        *((name, ("links", "inside_node", name)) for name in file.links.inside_node),
        *(
            (name, ("links", "between_types", i, "types", j))
            for i, between in enumerate(file.links.between_types)
            for j, name in enumerate(between.types)
        ),
    ]
    # A name that the file does not describe is the catalogue's.
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


def prices_that_nothing_counts(
    file: ClusterSection,
    gpu_types: Mapping[str, GpuType],
    islands: Sequence[Island],
    references: References,
) -> Iterator[Doubt]:
    """Yield the GPU types with a price that counts nowhere: each machine that has them gives its
    own."""
    for name, section in file.gpu_types.items():
        users = [i.section for i in islands if i.gpu.name == gpu_types[name].name]
        if section.price_per_hour is None or not users:
            continue
        if all(user.price_per_hour is not None for user in users):
            yield Doubt(
                references.place(("gpu_types", name, "price_per_hour")),
                "every machine with these GPUs has a price_per_hour of its own, which counts for "
                "all of it, so this one changes nothing",
                "leave out the price of the type, or those of the machines",
            )


def check_inside_links(
    file: ClusterSection, gpu_types: Mapping[str, GpuType], references: References
) -> None:
    """Refuse links of GPU types that are given twice, and nodes with several equal GPUs and no
    link.

    Aliases of one type count as one name; the error names all nodes without a link at once.

    Args:
        gpu_types: every GPU type of the file, by the name that the file gives it.
    Raises:
        ClusterError: a pair of types has two links or repeats a type, or a link is missing.
    """
    own_names: dict[frozenset[str], str] = {}
    # (types, place in the file) of each class of links.
    classes: list[tuple[tuple[str, ...], tuple[str | int, ...]]] = [
        *(((name,), ("links", "inside_node", name)) for name in file.links.inside_node),
        *(
            (between.types, ("links", "between_types", i))
            for i, between in enumerate(file.links.between_types)
        ),
    ]
    # A pair of types has one link, by whatever names.
    for names, keypath in classes:
        # Two aliases of one type are one type here.
        types = frozenset(gpu_types[name].name for name in names)
        if len(types) < len(names):
            references.fail(
                keypath,
                f"{next(iter(types))} stands here twice; the link between cards of one type is "
                "links.inside_node",
            )
        if types in own_names:
            shown = " and ".join(sorted(types))
            given = f"have a link already ({own_names[types]})"
            if len(types) == 1:
                given = "has a link already, under another name"
            references.fail(keypath, f"{shown} {given}; keep one")
        own_names[types] = ".".join(str(key) for key in keypath)
    # Machines of several equal cards need a link from somewhere.
    missing = {
        i: node
        for i, node in enumerate(file.nodes)
        if node.gpu is not None and node.count is not None and node.count > 1
        if node.link is None and not node.pairs
        if frozenset((gpu_types[node.gpu].name,)) not in own_names
    }
    if not missing:
        return
    quoted = [f'"{node.name}"' for node in missing.values()]
    # One message names every machine that lacks a link.
    shown = some_of(quoted)
    first = next(iter(missing))
    have = (
        f"node {shown} has {missing[first].count} GPUs"
        if len(quoted) == 1
        else f"nodes {shown} have several GPUs each"
    )
    keys = dict.fromkeys(f"links.inside_node.{node.gpu}" for node in missing.values())
    references.fail(
        ["nodes", first],
        f"{have} and no link between them; add {' and '.join(keys)} or a link of the node, for "
        "example link: {bandwidth: 20 GB/s, latency: 10 us}",
    )


def _uses_in_nodes(file: ClusterSection) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield the GPU types named by machines, each with its place in the file."""
    for i, node in enumerate(file.nodes):
        for j, cards in enumerate(node.cards):
            yield cards.type, ("nodes", i, "gpus", j, "type") if node.gpus else ("nodes", i, "gpu")


def _library(name: str, section: GpuSection, references: References) -> Library:
    """Return the library of a new type, from its name or from its compute capability, which only
    NVIDIA's GPUs have.

    Raises:
        ClusterError: neither shows the maker.
    """
    shown = library_of_name(name)
    if shown is None and section.compute_capability is None:
        references.fail(
            ["gpu_types", name],
            'the key "library" is missing, and the name shows no maker: write library: NCCL for an '
            f"NVIDIA GPU, RCCL for AMD's; all are {', '.join(LIBRARIES)}",
        )
    return shown or "NCCL"


def _defined_gpu_type(name: str, section: GpuSection, references: References) -> GpuType:
    """Build a new type, or a type of the catalogue with the numbers that the file corrects."""
    # A type that the catalogue knows needs only what differs.
    try:
        known = gpu_type(name)
    except ClusterError:
        known = None
    # Only keys that the file gives: a peak may be set to none on purpose.
    given = section.model_dump(exclude_unset=True)
    peaks: Mapping[str, float | None] = (
        known.peak_flops if known else dict.fromkeys(("bf16", "fp16", "fp32", "fp8"))
    )
    # Peaks of the file before those of the catalogue.
    peaks = {precision: given.get(precision, peak) for precision, peak in peaks.items()}
    memory_bytes = section.memory or (known.memory_bytes if known else None)
    memory_bytes_per_s = section.memory_bandwidth or (known.memory_bytes_per_s if known else None)
    # A new type needs memory, its bandwidth and a peak.
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
        library=section.library
        or (known.library if known else _library(name, section, references)),
        launch_s=usual_launch_s() if section.launch_time is None else section.launch_time,
        has_own_launch_time=section.launch_time is not None,
        # A measured part of the peak holds only for the peak that it is a part of.
        best_product=known.best_product if known and known.peak_flops == peaks else None,
        half_rate=known is not None and known.half_rate,
        board_watts=known.board_watts if known else None,
    )
