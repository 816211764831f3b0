"""A first cluster.yaml: from the GPUs of the machine it runs on, or from names typed by hand.

GPUs are asked of `nvidia-smi`, which every driver of NVIDIA brings along.  What a machine cannot
know of itself, the network, is left as a value to be measured, and says so.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cluster.gpu_names import find_gpu
from megatron_hetero.cluster.inventory.cards import Card, cards_of
from megatron_hetero.cluster.inventory.draft import NodeDraft, TypeDraft, made_up_name
from megatron_hetero.cluster.inventory.measurements import LinkFit
from megatron_hetero.cluster.inventory.nics import draft_nics, parse_ports
from megatron_hetero.cluster.inventory.topology import Topology, parse_topology
from megatron_hetero.errors import EnvironmentMismatchError, HeteroError

_QUERY = (
    "index",
    "name",
    "memory.total",
    "compute_cap",
    "pci.bus_id",
    "display_active",
    "memory.used",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "mig.mode.current",
)
_LIMIT_S = 30
# Windows come and go, so a screen is given this much at least.
_LEAST_RESERVE_MIB = 1024
_RESERVE_STEP_MIB = 512
_BUS_ID = re.compile(r"[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F]", re.ASCII)
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Bandwidth of a PCI Express lane in GB/s after the line code, by generation."""


@dataclass(frozen=True)
class FoundGpu:
    """GPU in the words of its driver; `catalogue_name` is None if the catalogue lacks the GPU.

    `index` is its number in `nvidia-smi`, and in the topology that this prints.
    """

    index: int
    name: str
    memory_bytes: int
    compute_capability: str
    catalogue_name: str | None
    bus_id: str = ""
    drives_screen: bool = False
    used_bytes: int = 0
    pcie_bytes_per_s: float | None = None
    """Bandwidth of the slot in one direction; None if there is no slot or the driver names none."""
    is_divided: bool = False
    """Whether MIG divides it, so that no program can have the whole."""

    @property
    def reserve(self) -> str | None:
        """Return the memory that the screen takes, if the GPU drives a screen: the memory in use
        now, rounded up."""
        if not self.drives_screen:
            return None
        # In MiB, rounded up to whole steps.
        steps = -(-(self.used_bytes >> 20) // _RESERVE_STEP_MIB)
        mib = max(_LEAST_RESERVE_MIB, steps * _RESERVE_STEP_MIB)
        return f"{mib >> 10} GiB" if mib % 1024 == 0 else f"{mib} MiB"

    @property
    def described(self) -> TypeDraft:
        """Describe the GPU as far as possible without the catalogue."""
        memory = f"{self.memory_bytes >> 20} MiB"
        # A driver may answer "[N/A]".
        is_version = re.fullmatch(r"[0-9]{1,2}\.[0-9]", self.compute_capability, re.ASCII)
        return TypeDraft(
            memory=memory, compute_capability=self.compute_capability if is_version else None
        )


def find_gpus() -> tuple[FoundGpu, ...]:
    """Find the GPUs of this machine.

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
    return parse_gpus(_run([program, *query()[1:]]))


def query() -> tuple[str, ...]:
    """Return the command whose answer `parse_gpus` reads."""
    return ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")


def check_whole(gpus: Sequence[FoundGpu]) -> None:
    """Refuse GPUs that MIG divides: a slice is no GPU of a cluster file.

    Raises:
        EnvironmentMismatchError: some are; the message names them.
    """
    divided = ",".join(str(gpu.index) for gpu in gpus if gpu.is_divided)
    if divided:
        raise EnvironmentMismatchError(
            f"MIG divides GPU {divided}, and training takes whole GPUs: end it with "
            f"`nvidia-smi -i {divided} -mig 0`, or write the file by hand without them"
        )


def topology_text() -> str:
    """Return the output of `nvidia-smi topo -m` on this machine.

    Raises:
        EnvironmentMismatchError: it does not answer.
    """
    return _run([shutil.which("nvidia-smi") or "nvidia-smi", "topo", "-m"])


def asked_topology(ask: Callable[[], str], source: str, gpus: Sequence[FoundGpu]) -> Topology:
    """Read the topology that a machine gives of its GPUs.

    Args:
        ask: returns the output of `nvidia-smi topo -m`.
        source: name of it in messages.
    Raises:
        EnvironmentMismatchError: it gives none; the message says how to go on without.
    """
    try:
        return parse_topology(ask(), source)
    except HeteroError as error:
        counts = Counter(gpu.catalogue_name or made_up_name(gpu.name) for gpu in gpus)
        cards = "+".join(f"{number}x{name}" for name, number in counts.items())
        raise EnvironmentMismatchError(
            f"{error}. Under WSL, in virtual machines and in containers the driver may know no "
            "topology: run discover there with --topology FILE, the output of `nvidia-smi topo -m` "
            f"on the bare machine; or begin with `megatron-hetero init --node NAME={cards}`, and "
            "measure the links by `megatron-hetero probe --pairs`."
        ) from None


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
    """Read the lines that `query` asks for: the GPUs in the order of the PCI bus.

    Raises:
        EnvironmentMismatchError: a line of another form, or none.
    """
    found = []
    for line in text.strip().splitlines():
        # Its words for an empty list, with which it ends well.
        if line.startswith("No devices were found"):
            continue
        words = [word.strip() for word in line.split(",")]
        gpu = _gpu(words)
        # A card that is lost, or one that shares the memory of the processor (GB10).
        if gpu is None and len(words) == len(_QUERY) and words[2].startswith("["):
            raise EnvironmentMismatchError(
                f"nvidia-smi gives no memory of GPU {words[0]!r}, {words[1]!r}, but {words[2]!r}: "
                "mend the card (`nvidia-smi -q` says more); or, where the processor's memory is "
                "its own, write the file by hand, as `megatron-hetero init` begins it"
            )
        if gpu is None:
            raise EnvironmentMismatchError(
                f"nvidia-smi answered {line!r}; expected {', '.join(_QUERY)}. Is the driver in "
                "order?"
            )
        found.append(gpu)
    if not found:
        raise EnvironmentMismatchError("nvidia-smi lists no GPU")
    # By domain, bus, device and function as numbers: a domain may have 4 digits or 8.
    return tuple(sorted(found, key=lambda gpu: [int(n, 16) for n in re.split("[:.]", gpu.bus_id)]))


def _gpu(words: list[str]) -> FoundGpu | None:
    if len(words) != len(_QUERY):
        return None
    index, name, total, capability, bus_id, display, used, generation, width, mig = words
    number, mib = _number(index), _number(total)
    # Without a number, memory and a place on the bus the line is no answer.
    if number is None or not mib or not _BUS_ID.fullmatch(bus_id.upper()):
        return None
    memory_bytes = mib << 20
    # Idle cards slow their links, so the highest generation counts, with the lanes in use.
    lane, lanes = _LANE_GB_PER_S.get(_number(generation) or 0), _number(width)
    return FoundGpu(
        number,
        name,
        memory_bytes,
        capability,
        catalogue_name(name, memory_bytes),
        bus_id,
        display == "Enabled",
        (_number(used) or 0) << 20,
        1e9 * lane * lanes if lane is not None and lanes is not None else None,
        mig == "Enabled",
    )


def _number(word: str) -> int | None:
    return int(word) if re.fullmatch("[0-9]{1,9}", word) else None


def catalogue_name(driver_name: str, memory_bytes: int) -> str | None:
    """Find the catalogue's GPU with the driver's name and, within a tenth, the same memory."""
    found = find_gpu(driver_name, memory_bytes)
    return None if found is None else found.name


def draft_node(
    gpus: Sequence[FoundGpu],
    topology: Topology | None,
    measured: LinkFit | None = None,
    host: str | None = None,
    ports: str = "",
) -> NodeDraft:
    """Describe this machine, its cards in the order of the bus.

    Args:
        gpus: as `find_gpus` finds them.
        host: name of the machine; None asks the system.
        topology: of `nvidia-smi topo -m`; None: unknown.
        ports: what `inventory.nics.port_files` say.
        measured: beats every guess between cards that no NVLink joins.
    Raises:
        EnvironmentMismatchError: the topology is of other GPUs.
    """
    if topology is not None and (wrong := {gpu.index for gpu in gpus} ^ set(topology.gpus)):
        raise EnvironmentMismatchError(
            f"the topology has {len(topology.gpus)} GPUs and the machine {len(gpus)}: GPU "
            f"{min(wrong)} stands in one of them alone. Give the `nvidia-smi topo -m` of this "
            "machine, as it is now."
        )
    # A node's name is a host name (RFC 1123); some machines are called otherwise.
    host = host or socket.gethostname().partition(".")[0]
    host = re.sub(r"[^A-Za-z0-9-]", "-", host).strip("-")[:50] or "node"
    link = None
    if measured is not None:
        link = (f"{measured.bytes_per_s / 1e9:.3g} GB/s", f"{measured.latency_s * 1e6:.3g} us")
    # Cards by the catalogue, or described as the driver does.
    cards = [
        Card(
            gpu.catalogue_name or made_up_name(gpu.name),
            None if gpu.catalogue_name else gpu.described,
            gpu.reserve,
            gpu.pcie_bytes_per_s,
        )
        for gpu in gpus
    ]
    # Joins by place in this list instead of the driver's number.
    joins = {} if topology is None else topology.joins
    places = {
        (i, j): joins[a.index, b.index]
        for i, a in enumerate(gpus)
        for j, b in enumerate(gpus)
        if (a.index, b.index) in joins
    }
    node = cards_of(host, cards, places, link)
    if topology is None:
        return node
    nics = draft_nics([gpu.index for gpu in gpus], topology, parse_ports(ports))
    return replace(node, nics=nics)
