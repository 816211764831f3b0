"""Plans keep to the GPUs of one communication library: where a cluster has several, each is planned
with, and the best of the plans is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from math import inf
from typing import Any, Concatenate, cast

from megatron_hetero.cluster.makers import Library, cannot_train
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.widths import usable_gpus
from megatron_hetero.cost.work.compute import can_train
from megatron_hetero.errors import InfeasiblePlanError, LibraryError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.libraries import library_of
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.objective import THROUGHPUT, Objective
from megatron_hetero.units import format_duration


def usable_libraries(cluster: Cluster, workload: Workload) -> tuple[Library, ...]:
    """Return libraries of the GPUs that limits and precision let the job use, in order of the
    nodes."""
    nodes = (
        node
        for node in cluster.nodes
        if can_train(workload.training, node.gpu_type) and usable_gpus(cluster, node)
    )
    return tuple(dict.fromkeys(node.gpu_type.library for node in nodes))


def check_trains(cluster: Cluster) -> None:
    """Refuse a cluster on whose GPUs the runtime cannot train at all.

    Raises:
        LibraryError: names a GPU type and why.
    """
    refused = [cannot_train(n.gpu_type.name, n.gpu_type.library) for n in cluster.nodes]
    if all(refused) or (cluster.library is not None and cannot_train("", cluster.library)):
        raise LibraryError(
            f"No GPU of {cluster.source or 'the cluster'} can be planned for: "
            f"{next(filter(None, refused), f'limits.library is {cluster.library}')}. If this is a "
            "GPU of another maker, give its `library` under gpu_types; other devices are not "
            "supported."
        )


def unused_reason(cluster: Cluster, node: Node) -> str:
    """Return why GPUs of a node stay unused whatever the plan; empty where their library is
    none."""
    gpu = node.gpu_type
    if why := cannot_train(gpu.name, gpu.library):
        return why
    if cluster.library not in (None, gpu.library):
        return f"{gpu.name} speaks {gpu.library}, and the plan's GPUs {cluster.library}"
    return ""


def for_each_library[**Parameters, Found](
    search: Callable[Concatenate[Cluster, Workload, Parameters], Found],
) -> Callable[Concatenate[Cluster, Workload, Parameters], Found]:
    """Return a search that plans once for each library of the cluster and takes the best plan. The
    search returns a plan, alone or first of a tuple. The plan's idle reasons tell the step of every
    other library alone."""

    @wraps(search)
    def best_of_all(
        cluster: Cluster, workload: Workload, /, *args: Parameters.args, **named: Parameters.kwargs
    ) -> Found:
        # One library: nothing to choose.
        libraries = usable_libraries(cluster, workload)
        if len(libraries) < 2:
            return search(cluster, workload, *args, **named)
        found: dict[Library, Found] = {}
        refused: dict[Library, InfeasiblePlanError] = {}
        # Plan for each; an interruption keeps what was found.
        for library in libraries:
            try:
                found[library] = search(replace(cluster, kept_to=library), workload, *args, **named)
            except InfeasiblePlanError as error:
                refused[library] = error
            except KeyboardInterrupt:
                if not found:
                    raise
                break
            # An interrupted search ends the others too.
            if found and _plan(next(reversed(found.values()))).made_by.endswith("(interrupted)"):
                break
        if not found:
            raise _none_fits(refused)
        # The best by the objective, with the step of every other.
        objective = cast(Objective, named.get("objective", THROUGHPUT))
        best = min(found, key=lambda library: value_of(_plan(found[library]), objective))
        alone = {library: _alone(_plan(other)) for library, other in found.items()}
        alone |= dict.fromkeys(refused, "no plan on them alone fits")
        return _with_plan(found[best], _explained(_plan(found[best]), cluster, alone))

    return best_of_all


def _plan(found: Any) -> Plan:
    return found if isinstance(found, Plan) else cast(Plan, found[0])


def _with_plan[Found](found: Found, plan: Plan) -> Found:
    return cast(Found, plan if isinstance(found, Plan) else (plan, *cast(Any, found)[1:]))


def value_of(plan: Plan, objective: Objective) -> tuple[float, float]:
    """Return what the objective makes small, then seconds of a step."""
    estimates = plan.estimates
    if estimates is None:
        return inf, inf
    step_s = estimates.step_time_s
    match objective.name:
        case "throughput":
            return step_s, step_s
        case "cheapest":
            price = estimates.price_per_million_tokens
            return (inf if price is None else price), step_s
        case "fewest-gpus":
            return float(plan.layout.num_devices), step_s


def _alone(plan: Plan) -> str:
    if plan.estimates is None:
        return ""
    step = format_duration(plan.estimates.step_time_s)
    return f"the best plan on {plan.layout.num_devices} of them alone takes {step} a step"


def _explained(plan: Plan, cluster: Cluster, alone: Mapping[Library, str]) -> Plan:
    """Return the plan, with the results of foreign libraries' GPUs among the idle reasons."""
    own = library_of(plan.hosts[0])
    reasons = dict(plan.idle_reasons)
    for device in plan.idle_devices:
        library = cluster.node_of(device).gpu_type.library
        if library != own and alone.get(library):
            reasons[device] = f"{reasons[device]}; {alone[library]}"
    return replace(plan, idle_reasons=reasons)


def _none_fits(refused: Mapping[Library, InfeasiblePlanError]) -> InfeasiblePlanError:
    parts = "\n".join(f"On its GPUs with {library}: {error}" for library, error in refused.items())
    return InfeasiblePlanError(
        "The GPUs of one job speak one communication library, and no library of this cluster has "
        f"enough of them.\n{parts}"
    )
