"""Checks of the machines of a launch, side by side.

`facts` have one entry for each rank, in rank order; `job` has what the plan expects of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_hetero.cluster.gpu_names import names_match
from megatron_hetero.cluster.names import device_place
from megatron_hetero.flags.environment import visible_devices_variable
from megatron_hetero.plan.communication.libraries import library_of
from megatron_hetero.plan.plan import Host
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job
from megatron_hetero.preflight.machine import MachineFacts
from megatron_hetero.preflight.network_checks import bridged_cards

GIB = 1 << 30
Facts = Sequence[MachineFacts]

_VERSIONS: tuple[tuple[str, str, Callable[[MachineFacts], str | None]], ...] = (
    ("torch-versions-differ", "torch", lambda f: f.torch),
    ("cuda-versions-differ", "CUDA or ROCm (of torch)", lambda f: f.cuda),
    ("nccl-versions-differ", "NCCL", lambda f: f.nccl),
    ("megatron-versions-differ", "megatron-core", lambda f: f.megatron_core),
    ("te-versions-differ", "Transformer Engine", lambda f: f.transformer_engine),
)


def versions_are_alike(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find unlike versions of libraries; NCCL fails or hangs then (NVIDIA/nccl#354, #889)."""
    for id_, name, of in _VERSIONS:
        # Version -> ranks that have it; "none" where the library is missing.
        ranks: dict[str, list[int]] = {}
        for fact in facts:
            ranks.setdefault(of(fact) or "none", []).append(fact.rank)
        if len(ranks) > 1:
            yield Finding(
                id_,
                "error",
                name,
                "the ranks have unlike versions: "
                + "; ".join(f"{version} on {_ranks(found)}" for version, found in ranks.items()),
                f"install one version of {name} on every machine",
            )


def nccl_is_not_known_to_err(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find NCCL 2.18 to 2.20 between A100 and H100 (NVIDIA/nccl#1184).

    All-reduce between DGX A100 and H100 hung there, and gave wrong values with NCCL_PROTO=SIMPLE.
    """
    # 8.0 is A100, 9.0 is H100.
    kinds = {fact.gpu_capability for fact in facts}
    if not {"8.0", "9.0"} <= kinds:
        return
    for version in sorted({fact.nccl for fact in facts if fact.nccl}):
        if tuple(map(int, version.split(".")[:2])) in ((2, 18), (2, 19), (2, 20)):
            yield Finding(
                "nccl-known-wrong",
                "error",
                f"NCCL {version}",
                "between A100 and H100 this release has hung and has returned wrong values",
                "install NCCL 2.21 or later on every machine",
            )


def torch_has_the_kernels(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find processes with a build of torch without kernels for the GPU."""
    for fact in facts:
        # A process without a GPU, or a torch that lists nothing, gives no answer.
        if fact.gpu_capability and fact.gpu_architectures and not _is_built(fact):
            yield Finding(
                "gpu-architecture-not-built",
                "error",
                _place(job, fact),
                f"torch {fact.torch} was built for {', '.join(fact.gpu_architectures)}, not for "
                f"compute capability {fact.gpu_capability}",
                "install a build of torch that has this architecture, the same on every machine",
            )


def gpus_are_the_plans(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find processes with another type of GPU than the plan gives the rank."""
    for fact in facts:
        wanted = job.plan.type_by_device[job.devices[fact.rank]]
        # A rehearsing process has no GPU to compare.
        if fact.gpu_name is not None and not names_match(wanted, fact.gpu_name):
            yield Finding(
                "gpu-type-differs",
                "error",
                _place(job, fact),
                f"the plan wants {wanted}, the process has {fact.gpu_name}",
                f"check {visible_devices_variable(library_of(_host(job, fact)))} and the order of "
                "the machines, or plan again",
            )


def cards_are_the_plans(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find processes with another card than the plan's; CUDA orders by speed, not by the bus."""
    # (machine, place on the bus) of each rank in the plan.
    places = {fact.rank: device_place(job.devices[fact.rank]) for fact in facts}
    # Machine -> bus id of its card before this one; bus ids ascend with the places.
    last: dict[str, str] = {}
    for fact in sorted(facts, key=lambda fact: places[fact.rank]):
        if fact.bus_id is None:
            continue
        host, place = _host(job, fact), places[fact.rank][1]
        is_behind = last.get(host.node, "") < fact.bus_id
        last[host.node] = fact.bus_id
        # With the order of the bus numbers cannot be confused, and only the sequence counts.
        is_bus_order = fact.environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if is_behind and (is_bus_order or fact.bus_place in (None, place)):
            continue
        yield Finding(
            "gpu-order-differs",
            "error",
            _place(job, fact),
            f"the plan numbers the cards by the PCI bus, and the process has the card at "
            f"{fact.bus_id}"
            + ("" if fact.bus_place is None else f", which is number {fact.bus_place} there"),
            f"CUDA_DEVICE_ORDER=PCI_BUS_ID and {visible_devices_variable(library_of(host))}="
            f"{','.join(map(str, host.gpu_indices))} on this machine, as `megatron-hetero flags` "
            "prints them",
        )


def screens_have_their_memory(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find cards with a screen for which the cluster file sets no memory aside."""
    for fact in facts:
        device = job.devices[fact.rank]
        if not fact.drives_screen or fact.total_bytes is None:
            continue
        # A description within half a GiB of the whole card has set nothing aside.
        if job.cluster.node_of(device).gpu_type.memory_bytes > fact.total_bytes - GIB // 2:
            yield Finding(
                "screen-on-gpu",
                "warning",
                _place(job, fact),
                "this card drives a screen, whose memory the cluster file does not set aside; what "
                "opens on the screen later can end the job",
                f"reserve: 1 GiB for {device} in the `gpus` of its machine, and plan again; or put "
                "the screen on another card",
            )


def bridges_are_there(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find links of the cluster file that only NVLink has, between cards without peer-to-peer."""
    by_device = {job.devices[fact.rank]: fact for fact in facts}
    for host in job.plan.hosts:
        # Torch numbers the peers of a card locally, as the host numbers its devices.
        local_ranks = {device: i for i, device in enumerate(host.type_by_device)}
        for one, other in bridged_cards(job, host):
            # None where the card is no rank's, or the driver was not asked.
            peers = by_device[one].peers if one in by_device else None
            if peers is not None and local_ranks[other] not in peers:
                yield Finding(
                    "peer-to-peer-refused",
                    "warning",
                    f"{one} and {other}",
                    "the cluster file joins them faster than PCIe, but the driver offers no "
                    "peer-to-peer between them: they talk through the machine's memory",
                    "look at `nvidia-smi topo -m` and `nvidia-smi nvlink --status` (is the bridge "
                    "seated?), or correct the link and plan again",
                )


def hosts_are_the_plans(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find processes on another host than the plan gives the rank."""
    for fact in facts:
        host = _host(job, fact).host
        # Without GPUs the check is a rehearsal on one machine.
        if fact.gpu_name is not None and host not in (*fact.host_names, *fact.addresses):
            yield Finding(
                "host-differs",
                "error",
                _place(job, fact),
                f"the plan wants host {host}, the process runs on {fact.host_names[0]}",
                "start the machines in the order that `megatron-hetero flags` prints",
            )


def memory_is_free(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find GPUs with less free memory than the plan's estimate takes."""
    if job.plan.estimates is None:
        return
    for fact in facts:
        device = job.devices[fact.rank]
        estimate = job.plan.estimates.devices.get(device)
        if fact.free_bytes is None or estimate is None:
            continue
        needed = estimate.tensor_bytes  # this process has its CUDA context already
        if fact.free_bytes < needed:
            yield Finding(
                "memory-taken",
                "error",
                _place(job, fact),
                f"{fact.free_bytes / GIB:.1f} GiB are free, the plan needs {needed / GIB:.1f} GiB",
                "end what else runs on this GPU (`nvidia-smi` lists it), or plan with a larger "
                "limits.memory_reserve",
            )


def kernels_are_installed(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find processes without the kernel packages that the job's flags ask for."""
    # Which package the job's layers come from.
    local = job.value("--transformer-impl") == "local"
    for fact in facts:
        if fact.gpu_name is None:
            continue
        if not local and fact.transformer_engine is None:
            yield Finding(
                "te-missing",
                "error",
                _place(job, fact),
                "Transformer Engine is not installed, and --transformer-impl asks for it "
                "(it is the default)",
                "install it, or use --transformer-impl local --no-persist-layer-norm "
                "--no-gradient-accumulation-fusion",
            )
        # The output layer is Megatron's own under Transformer Engine too, and fuses by Apex.
        defaults = ["--no-persist-layer-norm"] if local else []
        defaults += ["--no-gradient-accumulation-fusion"]
        missing = [flag for flag in defaults if not job.has(flag)]
        if missing and not fact.has_apex:
            whose = "local layers" if local else "Megatron's output layer"
            yield Finding(
                "apex-missing",
                "error",
                _place(job, fact),
                f"NVIDIA's Apex is not installed, and the defaults of {whose} need it",
                f"add {' '.join(missing)}",
            )


def attention_is_fused(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find machines on which Transformer Engine would store the scores of attention, where the plan
    counts on a fused kernel; divided sequences it cannot compute so."""
    workload = job.plan.workload
    if workload is None or not workload.training.flash_attention:
        return
    positions = rank_table(job.plan)
    for fact in facts:
        if fact.attention == "unfused":
            own = positions[fact.rank]
            shape = job.plan.replicas[own.replica].stages[own.stage].shape
            divides = shape.context_parallel > 1
            yield Finding(
                "attention-unfused",
                "error" if divides else "warning",
                _place(job, fact),
                "Transformer Engine has no fused attention here for the job's heads and sequence "
                + (
                    "length, and divides sequences by no other: the first step would fail"
                    if divides
                    else "length: it stores the scores, which takes more memory and time than the "
                    "plan says"
                ),
                "install flash-attn or a cuDNN that fits (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints "
                "the reasons), or plan with --attention-backend unfused",
            )


def interfaces_exist(job: Job, facts: Facts) -> Iterator[Finding]:
    """Find network interfaces in NCCL's and Gloo's variables that a machine does not have."""
    for fact in facts:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            value = fact.environment.get(name, "")
            # `^` excludes interfaces, which need not exist.
            if not value or value.startswith("^") or not fact.interfaces:
                continue
            # NCCL takes a name as a prefix unless `=` is before it; Gloo takes the whole name.
            exact = value.startswith("=") or name.startswith("GLOO")
            wanted = value.lstrip("=").split(",")
            if not any(i == w or (not exact and i.startswith(w)) for i in fact.interfaces
                       for w in wanted):  # fmt: skip
                yield Finding(
                    "interface-missing",
                    "error",
                    _place(job, fact),
                    f"{name}={value}, but the machine has {', '.join(fact.interfaces)}",
                    f"{name} on this machine to the card that leads to the others: names differ "
                    "between machines",
                )


def _host(job: Job, fact: MachineFacts) -> Host:
    return job.host_by_node[device_place(job.devices[fact.rank])[0]]


def _place(job: Job, fact: MachineFacts) -> str:
    return f"rank {fact.rank} ({job.devices[fact.rank]})"


def _is_built(fact: MachineFacts) -> bool:
    """Tell if torch has a cubin of the GPU's major version, no newer minor, or older PTX."""
    major, minor = map(int, (fact.gpu_capability or "0.0").split("."))
    for name in fact.gpu_architectures:
        # `sm_90a`, `compute_120f`: kind, version, and a letter for features of one GPU.
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        # PTX of an older version is compiled for this GPU at the start.
        if kind == "compute" and built <= (major, minor):
            return True
        # A cubin runs on its own major version, from its minor version on.
        if built[0] == major and built[1] <= minor:
            return True
    return False


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


CHECKS = (
    versions_are_alike,
    nccl_is_not_known_to_err,
    torch_has_the_kernels,
    gpus_are_the_plans,
    cards_are_the_plans,
    screens_have_their_memory,
    bridges_are_there,
    hosts_are_the_plans,
    memory_is_free,
    kernels_are_installed,
    attention_is_fused,
    interfaces_exist,
)


def check_machines(job: Job, facts: Facts) -> tuple[Finding, ...]:
    """Check the machines of a launch; `check_job` has checked plan and cluster file."""
    return tuple(finding for check in CHECKS for finding in check(job, facts))
