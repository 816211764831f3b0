"""FlagScale: `--hetero-process-meshes`, `--hetero-pipeline-layer-split` and the typed host file.

A mesh is five numbers, `tp cp ep dp pp`; meshes follow each other along the pipeline.  Every
replica has the same stages, and where the data-parallel sizes of meshes differ, micro-batches are
cut and joined between them, which no plan of ours does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.convert.flagscale_recompute import stage_recompute
from megatron_hetero.convert.given import Conversion, GivenFlags
from megatron_hetero.convert.ours_alone import refuse_our_own
from megatron_hetero.errors import ClusterError, FileFormatError, UnsupportedError, UsageError
from megatron_hetero.files import read_text
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape

_MESHES = "--hetero-process-meshes"
_SPLIT = "--hetero-pipeline-layer-split"
_HOST_LINE = re.compile(r"^(?P<host>\S+)\s+(?P<settings>.*)$")


@dataclass(frozen=True)
class Mesh:
    """One mesh: `pp` stages of width `tp` in each of `dp` replicas."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int

    @property
    def num_devices(self) -> int:
        """Count the GPUs; expert parallelism takes its own from the data-parallel ones."""
        return self.tp * self.cp * self.dp * self.pp


def from_flagscale(flags: GivenFlags) -> Conversion:
    """Read the layout that FlagScale's flags describe.

    Raises:
        UsageError: the numbers do not agree.
        UnsupportedError: context or expert parallelism, or data-parallel sizes that differ.
    """
    # Meshes give the stages' widths, all with one data-parallel size.
    meshes = _meshes(flags)
    widths = [mesh.tp for mesh in meshes for _ in range(mesh.pp)]
    layers = _layers(flags, len(widths))
    num_replicas = meshes[0].dp
    # Micro-batches of a replica: the global batch divided among all.
    size = flags.integer("--micro-batch-size")
    batch = flags.integer("--global-batch-size")
    if batch % (size * num_replicas):
        raise UsageError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {size} times "
            f"{num_replicas} replicas"
        )
    stages = tuple(StageShape(w, n) for w, n in zip(widths, layers, strict=True))
    replica = ReplicaShape(stages, batch // (size * num_replicas))
    # Name what a plan does not take over.
    notes: list[str] = []
    for name in flags.never_asked_for(("--hetero",)):
        if name not in ("--hetero-device-types", "--hetero-current-device-type"):
            notes.append(f"{name} is not converted")
    # Recompute by stage, where every micro-batch of a stage has the same.
    recompute = stage_recompute(flags, layers, replica.num_micro_batches, notes)
    notes += [
        f"{name} is not converted: put `recompute` into the stages of plan.json"
        for name in flags.never_asked_for(("--recompute",))
        if "per-stage" in name
    ]
    layout = format_layout(Layout((replica,) * num_replicas))
    return Conversion(layout, tuple(notes), recompute)


def to_flagscale(layout: Layout) -> str:
    """Write FlagScale's flags for a layout.

    Raises:
        UnsupportedError: replicas that differ, or a part that `refuse_our_own` refuses.
    """
    # What FlagScale cannot say is refused.
    first, *others = layout.replicas
    if any(replica != first for replica in others):
        raise UnsupportedError(
            "FlagScale gives every replica the same stages and micro-batches; this plan's differ"
        )
    refuse_our_own(layout, "FlagScale")
    widths = [stage.tensor_parallel for stage in first.stages]
    # Stages of one width in a row are a mesh: tp cp ep dp pp.
    runs = [(width, len(list(stages))) for width, stages in groupby(widths)]
    numbers = [f"{width} 1 1 {len(layout.replicas)} {pp}" for width, pp in runs]
    flags = [
        "--enable-hetero",
        f"{_MESHES} {' '.join(numbers)}",
        f"{_SPLIT} {' '.join(str(stage.num_layers) for stage in first.stages)}",
    ]
    # A size that the plan chose may be another than that of the job's own flags.
    if first.micro_batch_size is not None:
        flags.append(f"--micro-batch-size {first.micro_batch_size}")
    return " ".join(flags)


def cluster_text(hostfile: Path) -> str:
    """Write a first cluster.yaml from a typed host file (`HOST slots=8 type=A800`).

    A host on several lines is one machine with unlike GPUs, in the order of its lines.  A host file
    knows no links; the text says which are missing, and is refused until they are in.

    Raises:
        FileFormatError: a line that is none, with its number.
        ClusterError: a type of GPU that the catalogue does not know.
    """
    # Read the hosts line by line; a host on several lines has unlike cards.
    hosts: dict[str, list[tuple[str, int]]] = {}
    for number, line in enumerate(read_text(hostfile).splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _HOST_LINE.match(content)
        settings = dict(re.findall(r"(\w+)=(\S+)", found["settings"])) if found else {}
        if found is None or not settings.get("slots", "").isdecimal() or "type" not in settings:
            raise FileFormatError(
                f"{hostfile}:{number}: {content!r}; a line is HOST slots=NUMBER type=GPU"
            )
        try:
            gpus = gpu_type(settings["type"][:64]).name, int(settings["slots"][:6])
        except ClusterError as error:
            raise ClusterError(f"{hostfile}:{number}: {error}") from None
        hosts.setdefault(found["host"], []).append(gpus)
    # One node for each host.
    nodes = [
        f'  - {{name: node-{i}, {_cards_text(cards)}, host: "{host}"}}\n'
        for i, (host, cards) in enumerate(hosts.items())
    ]
    has_unlike_cards = any(len(cards) > 1 for cards in hosts.values())
    return _cluster_text(f"the host file {hostfile.name}", nodes, has_unlike_cards)


def _cards_text(cards: Sequence[tuple[str, int]]) -> str:
    if len(cards) == 1:
        ((gpu, count),) = cards
        return f"gpu: {gpu}, count: {count}"
    entries = ", ".join(f"{{type: {gpu}, count: {count}}}" for gpu, count in cards)
    return f"gpus: [{entries}]"


def cluster_of_meshes(
    flags: GivenFlags, device_types: Sequence[str], gpus_per_node: int | None, source: str
) -> str:
    """Write a first cluster.yaml of the GPUs that the meshes take, where no host file names the
    nodes.

    Args:
        device_types: one for each mesh, or one for all; a type that the catalogue does not know
            stays as it is, to be described under `gpu_types`.
        gpus_per_node: of every node; None is 8.
        source: what to name as the origin.
    Raises:
        UsageError: the meshes are no whole numbers, or there is not a type for each.
    """
    # A type for each mesh, or one for all.
    meshes = _five_each(flags)
    types = list(device_types) * (len(meshes) if len(device_types) == 1 else 1)
    if len(types) != len(meshes):
        raise UsageError(
            f"--hetero-device-types names {len(types)} types for {len(meshes)} meshes; give one "
            "for each, after -- if the file has none"
        )
    most = gpus_per_node or 8
    # Meshes of one type in a row fill nodes; the last one may be smaller.
    nodes: list[str] = []
    unknown: set[str] = set()
    for device, group in groupby(zip(types, meshes, strict=True), key=lambda pair: pair[0]):
        try:
            gpu = gpu_type(device).name
        except ClusterError:
            gpu = json.dumps(device)
            unknown.add(device)
        left = sum(mesh.num_devices for _, mesh in group)
        while left > 0:
            nodes.append(f"  - {{name: node-{len(nodes)}, gpu: {gpu}, count: {min(left, most)}}}\n")
            left -= most
    text = _cluster_text(f"{source}, {most} GPUs a node", nodes)
    # Types outside of the catalogue are left to the user, as a comment with what is missing.
    for device in sorted(unknown):
        text += (
            f"# The catalogue has no {json.dumps(device)}; describe it:\n# gpu_types:\n"
            f"#   {json.dumps(device)}: {{memory: ... GB, memory_bandwidth: ... GB/s, "
            "bf16: ... TFLOPS, fp16: ... TFLOPS, fp32: ... TFLOPS, library: ...}\n"
        )
    return text


def _cluster_text(source: str, nodes: Sequence[str], has_unlike_cards: bool = False) -> str:
    between_types = (
        "#   between_types:    # check that `gpus` follow the PCI bus, as nvidia-smi lists them\n"
        "#     - {types: [GPU-TYPE, GPU-TYPE], bandwidth: 12 GB/s, latency: 12 us}\n"
    )
    return (
        f"# From {source}, which knows no links: they are missing.\n"
        "version: 1\n\nnodes:\n" + "".join(nodes) + "\nlinks: {}\n"
        "# Put these in the place of it, filled in, then `megatron-hetero plan`:\n"
        "# links:\n"
        "#   inside_node:\n"
        "#     GPU-TYPE: {bandwidth: 20 GB/s, latency: 12 us}\n"
        + (between_types if has_unlike_cards else "")
        + "#   between_nodes: {bandwidth: 100 Gb/s, latency: 5 us}\n"
    )


def _five_each(flags: GivenFlags) -> list[Mesh]:
    # Five numbers for each mesh.
    numbers = flags.integers(_MESHES)
    if len(numbers) % 5:
        raise UsageError(
            f"{flags.where(_MESHES)}: {_MESHES} has {len(numbers)} numbers; five for each mesh are "
            "wanted, in the order tp cp ep dp pp"
        )
    return [Mesh(*numbers[i : i + 5]) for i in range(0, len(numbers), 5)]


def _meshes(flags: GivenFlags) -> list[Mesh]:
    meshes = _five_each(flags)
    for name, value in (("context", "cp"), ("expert", "ep")):
        if any(getattr(mesh, value) > 1 for mesh in meshes):
            raise UnsupportedError(
                f"{_MESHES}: {name} parallelism is not converted; use 1, or plan the cluster anew"
            )
    if len({mesh.dp for mesh in meshes}) > 1:
        raise UnsupportedError(
            f"{_MESHES}: data-parallel sizes {[mesh.dp for mesh in meshes]} differ. A replica of a "
            "plan holds whole stages; plan the cluster anew, which may give each replica its own."
        )
    return meshes


def _layers(flags: GivenFlags, num_stages: int) -> tuple[int, ...]:
    # Without a split the layers are divided evenly.
    if flags.has(_SPLIT):
        layers = flags.integers(_SPLIT)
        if len(layers) != num_stages:
            raise UsageError(
                f"{flags.where(_SPLIT)}: {_SPLIT} has {len(layers)} numbers for {num_stages} stages"
            )
        return layers
    total = flags.integer("--num-layers")
    if total % num_stages:
        raise UsageError(f"--num-layers {total} does not divide into {num_stages} stages evenly")
    return (total // num_stages,) * num_stages
