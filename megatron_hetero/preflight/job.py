"""The job under test: plan, cluster, Megatron flags, and the environment of each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.flags.launch import node_launches
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.plan.checks.violation import stages
from megatron_hetero.plan.plan import Host, Plan, Stage


@dataclass(frozen=True)
class StageOnNode:
    """A stage with its node."""

    replica: int
    stage: int
    content: Stage
    node: Node

    @property
    def gpu(self) -> GpuType:
        """Return the type of its GPUs."""
        return self.node.gpu_type

    @property
    def where(self) -> str:
        """Name the stage, for the `where` of a finding."""
        place = f"{self.gpu.name} of {self.node.machine}"
        return f"replica {self.replica}, stage {self.stage} ({place})"


@dataclass(frozen=True)
class Job:
    """Plan with devices of `cluster`, and the settings for its start.

    `environment[node]` holds the variables of the processes on a node: those of the launch lines,
    and the user's.
    """

    plan: Plan
    cluster: Cluster
    environment: Mapping[str, Mapping[str, str]]

    @cached_property
    def options(self) -> Mapping[str, tuple[str, ...]]:
        """Return Megatron's flags in force: longest name -> values (empty for a switch)."""
        given = () if self.plan.workload is None else self.plan.workload.megatron_args
        return {o.flag.names[0]: o.values for o in last_of_each(flag_table().split(given))}

    def value(self, name: str) -> str | None:
        """Return the value of a flag, or Megatron's default; None if it has neither."""
        values = self.options.get(name)
        if values:
            return values[0]
        default = flag_table().by_name[name].default
        return None if default is None else str(default)

    def has(self, *names: str) -> bool:
        """Tell if any of the flags is given."""
        return any(name in self.options for name in names)

    @cached_property
    def stages(self) -> tuple[StageOnNode, ...]:
        """Return every stage with its node."""
        return tuple(
            StageOnNode(r, s, stage, self.cluster.node_of(stage.devices[0]))
            for r, s, stage in stages(self.plan)
        )

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The GPU of every rank, "machine:index", in rank order."""
        return tuple(self.plan.type_by_device)

    @cached_property
    def host_by_node(self) -> Mapping[str, Host]:
        """The hosts of the launch by the names of their machines."""
        return {host.node: host for host in self.plan.hosts}

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes in use, islands of one machine apart, by node rank."""
        used = [self.cluster.node_of(device) for device in self.plan.type_by_device]
        return tuple({node.name: node for node in used}.values())

    @cached_property
    def gpu_types(self) -> tuple[GpuType, ...]:
        """Return the distinct GPU types in use, in launch order."""
        return tuple({node.gpu_type.name: node.gpu_type for node in self.nodes}.values())

    def variable(self, name: str) -> dict[str, str | None]:
        """Return the value of a variable on each node of the launch."""
        return {
            host.node: self.environment.get(host.node, {}).get(name) for host in self.plan.hosts
        }


def make_job(plan: Plan, cluster: Cluster, given: Sequence[str] = ()) -> Job:
    """Build the job as the launch lines start it, with the user's variables.

    Args:
        plan: a plan that is valid by itself and on `cluster`.
        cluster: the cluster with the plan's devices.
        given: `NAME=VALUE` for all nodes or `MACHINE:NAME=VALUE` for one; later ones win.
    Raises:
        PlanFormatError: the plan names no devices, or a host that no launch line can hold.
        UsageError: a variable is malformed, or its node is not in the launch.
    """
    if not plan.hosts:
        raise PlanFormatError(
            "the plan names no devices, so there is no hardware to look at; make one with "
            "`megatron-hetero plan --cluster CLUSTER.YAML`"
        )
    # Variables do not depend on where the machines keep the plan.
    launches = node_launches(plan, "plan.json")
    environment = {
        host.node: dict(launch.environment)
        for host, launch in zip(plan.hosts, launches, strict=True)
    }
    for text in given:
        for node, (name, value) in _assignments(text, tuple(environment)):
            environment[node][name] = value
    return Job(plan, cluster, environment)


def _assignments(text: str, nodes: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, str]]]:
    # The value may hold `=` and `:` itself, so the first `=` divides.
    left, separator, value = text.partition("=")
    node, colon, name = left.rpartition(":")
    if not separator or not name.isidentifier():
        raise UsageError(f"--env {text}: write NAME=VALUE, or MACHINE:NAME=VALUE for one machine")
    if colon and node not in nodes:
        raise UsageError(f'--env {text}: "{node}" is no machine of the launch ({", ".join(nodes)})')
    # Without a machine before the colon the variable holds on all machines.
    for target in (node,) if colon else nodes:
        yield target, (name, value)
