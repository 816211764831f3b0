"""Input of every launcher: the plan, and the settings of its start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.names import device_place
from megatron_hetero.errors import ClusterError, UsageError
from megatron_hetero.flags.launch import DEFAULT_MASTER_PORT, check_hosts, check_master_port
from megatron_hetero.flags.launchers.replanning import OnLoss
from megatron_hetero.flags.launchers.sky_tasks import CarriedTask
from megatron_hetero.plan.plan import Host, Plan

JOB_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""A name of a job by the rules of the strictest launcher."""

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9/][\w.:/@+#-]*", re.ASCII)
"""Also a file, or "registry#image:tag", as pyxis names them."""


@dataclass(frozen=True)
class LaunchFile:
    """A file to write: its name in the folder, its text, and its mode."""

    name: str
    text: str
    executable: bool = False


@dataclass(frozen=True)
class Component:
    """Consecutive nodes of the launch with the same GPU type and the same number of GPUs.

    They may lie in several sites: a plan does not say where its machines are. What starts them
    gives each its own rank.
    `first_node_rank` is the `--node-rank` of the first node. `gpus_per_node` counts all GPUs of a
    node, also those that the plan leaves idle, so that indices mean the same everywhere.
    """

    index: int
    first_node_rank: int
    hosts: tuple[Host, ...]
    gpus_per_node: int

    @property
    def kind(self) -> str:
        """Return the GPU type for people; for unlike GPUs, all names with their numbers."""
        return self.hosts[0].kind

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Return the catalogue's names of all GPUs of a node."""
        return tuple(dict.fromkeys(self.hosts[0].type_by_device.values()))


@dataclass(frozen=True)
class BatchOptions:
    """Options of a site for a job of any batch system.

    `cpus_per_task` and `memory` hold (kind of GPU, value), since unlike machines have unlike core
    counts; the kind "" stands for all other nodes.
    """

    account: str | None = None
    time: str | None = None
    cpus_per_task: tuple[tuple[str, str], ...] = ()
    memory: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SlurmOptions(BatchOptions):
    """Options of a site for a Slurm job.

    `partition` holds (kind of GPU, value), as `memory` does.
    `shares_nodes` if other jobs hold GPUs of the machines.
    """

    partition: tuple[tuple[str, str], ...] = ()
    qos: str | None = None
    requeue: bool = False
    mounts: str | None = None
    shares_nodes: bool = False


@dataclass(frozen=True)
class PbsOptions(BatchOptions):
    """Options of a site for a PBS job."""

    queue: str | None = None


@dataclass(frozen=True)
class SkyOptions:
    """Options of SkyPilot: `infra` holds (kind of GPU, cloud/region), `is_spot` rents machines that
    may be taken away, `tasks` holds (kind of GPU, task of the user's)."""

    infra: tuple[tuple[str, str], ...] = ()
    is_spot: bool = False
    tasks: tuple[tuple[str, CarriedTask], ...] = ()


@dataclass(frozen=True)
class LaunchJob:
    """One job to write launch files for.

    `script`: a pre-training script of the user's own instead of `megatron_hetero.pretrain_gpt`.
    `more_flags`: Megatron flags of the user's, beside those that the plan remembers.
    `image`: container image, for launchers that need one.
    `is_installed_by_script`: `install.sh` lies beside `train.sh`.
    `opens_ports`: rented machines take connections of any address (SkyPilot).
    `interfaces`: (machine, network interface that its ranks talk over); "" stands for all others.
    `takes_public_addresses`: hosts may be named by public addresses.
    `replanning`: how the job goes on when machines are lost; None where a person sees to that.
    `notes`: parts of the options' files that are not taken over.
    """

    plan: Plan
    name: str = "megatron-hetero"
    script: str | None = None
    more_flags: tuple[str, ...] = ()
    master_port: int = DEFAULT_MASTER_PORT
    image: str | None = None
    is_installed_by_script: bool = False
    opens_ports: bool = False
    slurm: SlurmOptions = SlurmOptions()
    pbs: PbsOptions = PbsOptions()
    interfaces: tuple[tuple[str, str], ...] = ()
    takes_public_addresses: bool = False
    replanning: OnLoss | None = None
    sky: SkyOptions = SkyOptions()
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a job that no launcher can start.

        Raises:
            UsageError: the plan has no hosts, or a name or port is not valid.
            PlanFormatError: a host name cannot be used.
        """
        if not self.plan.hosts:
            raise UsageError(
                "the plan names no machines (it was made from a bare layout), so there is nothing "
                "to launch on. Plan with --cluster, or start the torchrun line of "
                "`megatron-hetero flags`."
            )
        check_hosts(self.plan.hosts, may_be_public=self.takes_public_addresses)
        # A job that is planned again may come to any machine of the cluster.
        machines, of_what = [host.node for host in self.plan.hosts], "the plan"
        if self.replanning is not None:
            self.replanning.check(self.plan, self.more_flags)
            machines, of_what = [name for name, _ in self.replanning.machines], "the cluster"
        for machine, name in self.interfaces:
            if not _INTERFACE.fullmatch(name):
                raise UsageError(
                    f"--interface {name!r}: not the name of a network interface, such as eth1"
                )
            if machine and machine not in machines:
                raise UsageError(
                    f'--interface {machine}={name}: "{machine}" is no machine of {of_what} '
                    f"({', '.join(machines)})"
                )
        # One name for all launchers, by the rules of the strictest.
        if not JOB_NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name!r}: allowed are up to 40 lower-case letters, digits and '-', "
                "a letter first (Kubernetes and DNS ask for it)."
            )
        if self.script is not None and (not self.script or self.script.startswith("-")):
            raise UsageError(
                f"--script {self.script!r}: torchrun would read it as a flag; write ./ before it"
            )
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            raise UsageError(
                f"--image {self.image!r}: not the name of a container image, such as "
                "registry.example/megatron-hetero:0.1.0"
            )
        check_master_port(self.master_port)

    def interface_of(self, machine: str) -> str | None:
        """Return the interface of a machine; of "" the one for all that have none of their own."""
        return dict(self.interfaces).get(machine)

    @property
    def components(self) -> tuple[Component, ...]:
        """Group the nodes, in rank order, into runs of equal GPU type and count."""
        found: list[Component] = []
        rank = 0
        # Consecutive hosts only: the order of ranks stays.
        for (_, gpus), group in groupby(self.plan.hosts, self._kind):
            hosts = tuple(group)
            found.append(Component(len(found), rank, hosts, gpus))
            rank += len(hosts)
        return tuple(found)

    def _kind(self, host: Host) -> tuple[str, int]:
        # Idle GPUs count, so that the numbers of the others stay the plan's.
        idle = sum(device_place(name)[0] == host.node for name in self.plan.idle_devices)
        return host.kind, len(host.gpu_indices) + idle


def indented(lines: Sequence[str], by: int) -> str:
    """Join lines into one text, each indented by `by` spaces; empty lines stay empty."""
    return "".join(f"{' ' * by}{line}".rstrip() + "\n" for line in lines)


def by_kind(
    option: str, given: Sequence[str], pattern: re.Pattern[str], what: str
) -> tuple[tuple[str, str], ...]:
    """Read values of an option, each for all nodes or (`GPU-TYPE=VALUE`) for those of a kind.

    Args:
        option: its name, for messages.
        given: the values.
        pattern: of a value.
        what: a value, in words.
    Raises:
        UsageError: no such value, or two for the same nodes.
    """
    found: dict[str, str] = {}
    for text in given:
        # Without a kind the value is for all nodes.
        kind, _, value = text.rpartition("=")
        if not pattern.fullmatch(value):
            raise UsageError(f"{option} {text!r}: {what} is wanted, or GPU-TYPE={what}")
        if kind in found:
            raise UsageError(f"{option} {text!r}: there is {found[kind]!r} for these nodes already")
        found[kind] = value
    return tuple(found.items())


def of_kind[Value](given: tuple[tuple[str, Value], ...], component: Component) -> Value | None:
    """Return the value for the nodes of a component; that of one of its GPUs, where it has unlike
    ones and none of its own.

    Raises:
        UsageError: two of its GPUs have unlike values.
    """
    values = dict(given)
    # A value for this very mixture of GPUs wins.
    if component.kind in values:
        return values[component.kind]
    # Else the values of its GPUs, which have to agree, or the value for all.
    found = {kind: values[kind] for kind in component.gpu_types if kind in values}
    first = next(iter(found.values()), values.get(""))
    if any(value != first for value in found.values()):
        words = ", ".join(f"{kind}={value}" for kind, value in found.items())
        raise UsageError(
            f"{words}: machine {component.hosts[0].node} has both; give one value as "
            f"'{component.kind}=VALUE'"
        )
    return first


def without_unused[Value](
    option: str, given: tuple[tuple[str, Value], ...], job: LaunchJob
) -> tuple[tuple[tuple[str, Value], ...], tuple[str, ...]]:
    """Return the values for machines of the plan, and notes on those for other known GPUs.

    A list of machines may have kinds that the plan leaves idle.

    Args:
        option: its name, for messages.
        given: values by kind of GPU.
        job: the job with the plan.
    Raises:
        UsageError: a kind is neither one of the plan's nor one of the catalogue's.
    """
    types = {component.kind for component in job.components}
    kept, notes = [], []
    for kind, value in given:
        if not kind or kind in types or any(kind in c.gpu_types for c in job.components):
            kept.append((kind, value))
            continue
        fault = f"the plan's nodes have {', '.join(sorted(types))}, not {kind}"
        # A GPU of the catalogue may be idle in this plan; any other name is a slip.
        try:
            gpu_type(kind)
        except ClusterError:
            raise UsageError(f"{option} {kind}={value}: {fault}") from None
        notes.append(f"{option} {kind}={value} is not needed: {fault}")
    return tuple(kept), tuple(notes)
