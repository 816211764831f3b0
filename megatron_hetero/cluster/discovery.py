"""A first cluster.yaml: from the GPUs of the machine it runs on, or from names typed by hand.

GPUs are asked of `nvidia-smi`, which every driver of NVIDIA brings along.  What a machine cannot
know of itself, the network, is left as a value to be measured, and says so.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.driver_names import names_match
from megatron_hetero.cluster.measurements import LinkFit
from megatron_hetero.errors import EnvironmentMismatchError

_QUERY = ("index", "name", "memory.total", "compute_cap")
_LIMIT_S = 30

GUESSES: Mapping[str, tuple[str, str]] = {
    "NV": ("200 GB/s", "5 us"),
    "PIX": ("20 GB/s", "10 us"),
    "PXB": ("20 GB/s", "10 us"),
    "PHB": ("12 GB/s", "12 us"),
    "NODE": ("12 GB/s", "12 us"),
    "SYS": ("8 GB/s", "15 us"),
}
"""What a kind of path of `nvidia-smi topo -m` usually carries between two GPUs; a place to start,
marked as a guess in the file."""
_ORDER = tuple(GUESSES)
NETWORK_GUESS = ("10 Gb/s", "50 us")


@dataclass(frozen=True)
class FoundGpu:
    """One GPU as its driver describes it; `catalogue_name` is None where the catalogue lacks it."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: str
    catalogue_name: str | None


@dataclass(frozen=True)
class NodeDraft:
    """A node of the file to be: `gpu` is a name of the catalogue, or a made-up one with numbers."""

    name: str
    gpu: str
    count: int
    link: tuple[str, str]
    link_is_measured: bool
    described: FoundGpu | None = None
    """The GPU whose numbers the file must give, because the catalogue lacks it."""


def find_gpus() -> tuple[FoundGpu, ...]:
    """The GPUs of this machine.

    Raises:
        EnvironmentMismatchError: no NVIDIA driver here, or it does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise EnvironmentMismatchError(
            "this machine has no nvidia-smi, so no NVIDIA driver and no GPU that could be found. "
            "Run `discover` on the machines with GPUs, or write the file by hand: "
            "`megatron-hetero init --node a100-0=4xA100-80GB`."
        )
    done = _run([program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
    return parse_gpus(done)


def topology_text() -> str:
    """What `nvidia-smi topo -m` prints here.

    Raises:
        EnvironmentMismatchError: it does not answer.
    """
    return _run([shutil.which("nvidia-smi") or "nvidia-smi", "topo", "-m"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentMismatchError(f"{command[0]} does not answer: {error}") from error
    if done.returncode:
        raise EnvironmentMismatchError(
            f"{' '.join(command[:2])} ended with {done.returncode}: "
            f"{(done.stdout + done.stderr).strip()[-300:]}"
        )
    return done.stdout


def parse_gpus(text: str) -> tuple[FoundGpu, ...]:
    """Read lines of `index, name, memory in MiB, compute capability`.

    Raises:
        EnvironmentMismatchError: a line of another form, or none.
    """
    found = []
    for line in text.strip().splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(_QUERY) or not (words[0].isdigit() and words[2].isdigit()):
            raise EnvironmentMismatchError(
                f"nvidia-smi answered {line!r}; expected {', '.join(_QUERY)}. Is the driver in "
                "order?"
            )
        memory_bytes = int(words[2]) << 20
        name = catalogue_name(words[1], memory_bytes)
        found.append(FoundGpu(int(words[0]), words[1], memory_bytes, words[3], name))
    if not found:
        raise EnvironmentMismatchError("nvidia-smi lists no GPU")
    return tuple(found)


def catalogue_name(driver_name: str, memory_bytes: int) -> str | None:
    """The catalogue's GPU of that name whose memory is nearest, within a tenth."""
    near = [
        (abs(known.memory_bytes / memory_bytes - 1), -len(name), name)
        for name in gpu_type_names()
        if names_match(name, driver_name)
        for known in [gpu_type(name)]
    ]
    # The longest name is the most particular: "A100-80GB-PCIe" before "A100-80GB".
    return min(near)[2] if near and min(near)[0] < 0.1 else None


def draft_nodes(
    gpus: Sequence[FoundGpu],
    joins: Mapping[tuple[int, int], str],
    measured: LinkFit | None = None,
    host: str | None = None,
) -> tuple[NodeDraft, ...]:
    """This machine as nodes: one for each type of GPU in it.

    `joins` is of `nvidia-smi topo -m` (empty: unknown); the slowest path between two GPUs of a type
    stands for all of them.  `measured` beats it.
    """
    # A node's name is a host name (RFC 1123); some machines are called otherwise.
    host = host or socket.gethostname().partition(".")[0]
    host = re.sub(r"[^A-Za-z0-9-]", "-", host).strip("-")[:50] or "node"
    kinds: dict[str, list[FoundGpu]] = {}
    for gpu in gpus:
        kinds.setdefault(gpu.catalogue_name or _made_up(gpu), []).append(gpu)
    drafts = []
    for number, (kind, members) in enumerate(kinds.items()):
        indices = [gpu.index for gpu in members]
        paths = {joins.get((i, j), "SYS") for i in indices for j in indices if i != j}
        slowest = max(paths, key=_rank, default="SYS")
        link = GUESSES["NV" if slowest.startswith("NV") else slowest]
        if measured is not None:
            link = (f"{measured.bytes_per_s / 1e9:.3g} GB/s", f"{measured.latency_s * 1e6:.3g} us")
        drafts.append(
            NodeDraft(
                host if len(kinds) == 1 else f"{host}-{number}",
                kind,
                len(members),
                link,
                measured is not None,
                None if members[0].catalogue_name else members[0],
            )
        )
    return tuple(drafts)


def cluster_yaml(nodes: Sequence[NodeDraft], heading: str) -> str:
    """The text of a cluster file; values that nobody has measured are marked as guesses."""
    lines = [f"# {heading}", "version: 1", "", "nodes:"]
    lines += [f"  - {{name: {n.name}, gpu: {n.gpu}, count: {n.count}}}" for n in nodes]
    described = {n.gpu: n.described for n in nodes if n.described is not None}
    if described:
        lines += ["", "gpu_types:", "  # Not in the catalogue: give the dense peaks of the sheet."]
        for name, gpu in described.items():
            lines.append(
                f"  {name}: {{memory: {gpu.memory_bytes >> 20} MiB, compute_capability: "
                f'"{gpu.compute_capability}", memory_bandwidth: "? GB/s", bf16: "? TFLOPS"}}'
            )
    lines += ["", "links:", "  # What one pair of GPUs sees, in one direction."]
    inside = {n.gpu: n for n in nodes if n.count > 1}
    if inside:
        lines.append("  inside_node:")
        for name, node in inside.items():
            mark = "" if node.link_is_measured else "  # a guess: measure it"
            lines.append(
                f"    {name}: {{bandwidth: {node.link[0]}, latency: {node.link[1]}}}{mark}"
            )
    if len(nodes) > 1:
        lines.append(
            f"  between_nodes: {{bandwidth: {NETWORK_GUESS[0]}, latency: {NETWORK_GUESS[1]}}}"
            "  # a guess: measure it"
        )
    if len(lines) and lines[-1].startswith("  #"):
        lines[-2:] = ["links: {}"]
    return "\n".join(lines) + "\n"


def _made_up(gpu: FoundGpu) -> str:
    words = gpu.name.replace("NVIDIA", "").replace("GeForce", "").split()
    return "-".join("".join(c for c in w if c.isalnum() or c == "-") for w in words) or "GPU"


def _rank(join: str) -> int:
    return _ORDER.index("NV" if join.startswith("NV") else join)
