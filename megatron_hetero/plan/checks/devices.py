"""Invariants of a plan's devices and hosts: each GPU in one place, ranks that bind to places."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from megatron_hetero.cluster.makers import LIBRARIES, mixed_libraries
from megatron_hetero.cluster.names import is_number
from megatron_hetero.plan.checks.violation import Violation, stage_key, stage_name, stages
from megatron_hetero.plan.communication.libraries import library_of, library_shown
from megatron_hetero.plan.plan import Plan

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")
"""RFC 1123.  Host names travel into launch lines: one that begins with '-' would be an option."""

_IPV6_ADDRESS = re.compile(r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,7}\Z")


def devices_everywhere_or_nowhere(plan: Plan) -> Iterator[Violation]:
    """Find stages without devices where others have some, and devices without hosts."""
    # A plan either places all of its stages, or leaves the places to `plan.place`.
    named = [(r, s, bool(stage.devices)) for r, s, stage in stages(plan)]
    if any(has for *_, has in named):
        for r, s, has in named:
            if not has:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"{stage_name(r, s)} names no devices, but other stages do. "
                    "Name them for every stage, or for none.",
                )
        if not plan.hosts:
            yield Violation(
                ("hosts",), "stages name devices, but the plan has no hosts to start them on."
            )
    elif plan.hosts:
        yield Violation(("hosts",), "the plan has hosts, but its stages name no devices.")


def as_many_devices_as_ranks(plan: Plan) -> Iterator[Violation]:
    """Find stages whose number of devices is not width times context-parallel size."""
    for r, s, stage in stages(plan):
        shape = stage.shape
        if stage.devices and len(stage.devices) != shape.num_devices:
            times = f" times context-parallel size {shape.context_parallel}"
            wanted = f"{shape.num_devices} device{'' if shape.num_devices == 1 else 's'}"
            yield Violation(
                stage_key(r, s, "devices"),
                f"{stage_name(r, s)} names {len(stage.devices)} devices for tensor-parallel width "
                f"{shape.tensor_parallel}{times if shape.context_parallel > 1 else ''}; "
                f"name {wanted}, or change the width.",
            )


def each_device_in_one_place(plan: Plan) -> Iterator[Violation]:
    """Find devices in two stages, twice among the idle devices, or in both a stage and the idle
    devices."""
    place_of_device: dict[str, str] = {}
    for r, s, stage in stages(plan):
        for device in stage.devices:
            if device in place_of_device:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"device {device} is in {stage_name(r, s)} and in {place_of_device[device]}; "
                    "a device has one place. Put another device into one of them.",
                )
            place_of_device[device] = stage_name(r, s)
    # Idle devices: none that trains, and each once.
    for device, count in Counter(plan.idle_devices).items():
        if device in place_of_device:
            yield Violation(
                ("idle_devices",),
                f"device {device} is idle and in {place_of_device[device]}; remove it from one.",
            )
        if count > 1:
            yield Violation(
                ("idle_devices",), f"device {device} is listed {count} times; once is enough."
            )
    for device in sorted(set(plan.idle_reasons) - set(plan.idle_devices)):
        yield Violation(
            ("idle_reasons", device),
            f"idle_reasons explains {device}, which is not among idle_devices.",
        )


def hosts_are_sound(plan: Plan) -> Iterator[Violation]:
    """Find hosts with a name that no network takes, listed twice, or with unsound GPU indices."""
    seen: dict[str, int] = {}
    for i, host in enumerate(plan.hosts):
        key = ("hosts", i)
        if not is_host_name(host.host):
            yield Violation(
                (*key, "host"),
                f"host {host.host!r} of machine {host.node} is not a host name; allowed are RFC "
                "1123 names (letters, digits, '-' inside, '.') and IP addresses.",
            )
        # The first place of a machine is kept, so that the second one is at fault.
        if seen.setdefault(host.node, i) != i:
            yield Violation((*key, "node"), f"machine {host.node} is listed twice among the hosts.")
        if not host.gpu_indices:
            yield Violation(
                (*key, "gpu_indices"),
                f"machine {host.node} gives no GPU; leave it out of the hosts.",
            )
        # One type for all, or a list with one for each GPU, and never both.
        if (host.gpu_type is None) != bool(host.gpu_types) or (
            host.gpu_types and len(host.gpu_types) != len(host.gpu_indices)
        ):
            yield Violation(
                (*key, "gpu_types"),
                f"machine {host.node} has gpu_type {host.gpu_type!r} and {len(host.gpu_types)} "
                f"gpu_types for {len(host.gpu_indices)} GPUs; give one gpu_type for all, or null "
                "and one of gpu_types for each of gpu_indices.",
            )
        for index, count in Counter(host.gpu_indices).items():
            if index < 0 or count > 1:
                trouble = "is negative" if index < 0 else "is listed twice"
                yield Violation(
                    (*key, "gpu_indices"), f"GPU index {index} of machine {host.node} {trouble}."
                )


def is_host_name(name: str) -> bool:
    """Return whether `name` is an RFC 1123 host name or an IP address: no option or command."""
    # A row of digits is an IPv4 number to some resolvers, and no name.
    is_name = bool(_HOST_NAME.match(name)) and not is_number(name)
    return len(name) <= 253 and (is_name or bool(_IPV6_ADDRESS.match(name)))


def hosts_speak_one_library(plan: Plan) -> Iterator[Violation]:
    """Find hosts whose GPUs have no communication library in common."""
    why = mixed_libraries((host.node, host.kind, library_of(host)) for host in plan.hosts)
    if why:
        yield Violation(("hosts",), why)


def hosts_say_their_library(plan: Plan) -> Iterator[Violation]:
    """Find hosts of an unknown maker that do not say their library."""
    for i, host in enumerate(plan.hosts):
        if host.library is None and host.gpu_indices and library_shown(host) is None:
            yield Violation(
                ("hosts", i, "library"),
                f"machine {host.node} has {host.kind}, a type that the catalogue does not have and "
                "whose name shows no maker, and the plan does not say its communication library. "
                "Plan again, or write the library here: NCCL for an NVIDIA GPU, RCCL for AMD's; "
                f"all are {', '.join(LIBRARIES)}.",
            )


def hosts_hold_exactly_the_devices(plan: Plan) -> Iterator[Violation]:
    """Find devices of stages that are on no host, and GPUs of hosts without a stage."""
    # Both ways: every device has a host, and every GPU of a host has a stage.
    hosted = set(_devices_by_rank(plan))
    for r, s, stage in stages(plan):
        for device in stage.devices:
            if device not in hosted:
                yield Violation(
                    stage_key(r, s, "devices"),
                    f"device {device} of {stage_name(r, s)} is on no host of the plan; add its "
                    "index to the gpu_indices of its machine under hosts.",
                )
    used = {device for _, _, stage in stages(plan) for device in stage.devices}
    for i, host in enumerate(plan.hosts):
        for index in host.gpu_indices:
            if f"{host.node}:{index}" not in used:
                yield Violation(
                    ("hosts", i, "gpu_indices"),
                    f"machine {host.node} starts a process for GPU {index}, which is in no stage; "
                    "remove the index.",
                )


def stages_are_in_rank_order(plan: Plan) -> Iterator[Violation]:
    """Find stages whose devices are not sorted by rank."""
    # Ranks follow the hosts and their GPUs, which need not be the order of the stages.
    rank_of_device = {device: rank for rank, device in enumerate(_devices_by_rank(plan))}
    for r, s, stage in stages(plan):
        ordered = tuple(sorted(stage.devices, key=lambda device: rank_of_device[device]))
        if stage.devices != ordered:
            yield Violation(
                stage_key(r, s, "devices"),
                f"{stage_name(r, s)}: devices {', '.join(stage.devices)} are not in rank order; "
                f"by the order of hosts and gpu_indices it is {', '.join(ordered)}.",
            )


def last_rank_is_the_last_place(plan: Plan) -> Iterator[Violation]:
    """Find a last global rank that is not the last place of the plan, where Megatron prints losses
    and the log."""
    if not plan.hosts:
        return
    last_device = plan.replicas[-1].stages[-1].devices[-1]
    device_of_last_rank = _devices_by_rank(plan)[-1]
    if device_of_last_rank != last_device:
        yield Violation(
            ("hosts", len(plan.hosts) - 1),
            f"the last global rank is {device_of_last_rank}, but Megatron logs there and needs the "
            f"last device of the last stage of the last replica, {last_device}. Move its host to "
            "the end of hosts and its index to the end of gpu_indices.",
        )


def _devices_by_rank(plan: Plan) -> list[str]:
    return [f"{host.node}:{index}" for host in plan.hosts for index in host.gpu_indices]


def exchange_groups_are_of_the_hosts(plan: Plan) -> Iterator[Violation]:
    """Find machines of the plan in no exchange group or in several, and unknown machines in
    groups."""
    if not plan.exchange_groups:
        return
    key = "exchange_groups"
    if not plan.hosts:
        yield Violation(
            (key,), "exchange_groups names machines, but the plan has no hosts. Leave it empty."
        )
        return
    # One group is the exchange among all holders, which the empty list says already.
    if len(plan.exchange_groups) == 1:
        yield Violation(
            (key,), "exchange_groups has one group, which is none; name two or more, or none."
        )
    # Each machine stands once; what is left over stands nowhere.
    machines = {host.node for host in plan.hosts}
    found: dict[str, int] = {}
    for number, group in enumerate(plan.exchange_groups):
        if not group:
            yield Violation((key, number), f"exchange_groups[{number}] names no machine.")
        for machine in group:
            if machine not in machines:
                yield Violation(
                    (key, number),
                    f"exchange_groups[{number}] names {machine}, which is no machine of the plan; "
                    f"these are {', '.join(sorted(machines))}.",
                )
            elif machine in found:
                yield Violation(
                    (key, number),
                    f"{machine} is in exchange_groups[{found[machine]}] and "
                    f"exchange_groups[{number}]; it has one place.",
                )
            found.setdefault(machine, number)
    for machine in sorted(machines - set(found)):
        yield Violation((key,), f"{machine} is in none of the exchange_groups; put it into one.")


def exchange_uplinks_are_of_the_groups(plan: Plan) -> Iterator[Violation]:
    """Find relative bandwidths that are not a positive whole number for each machine of the
    exchange groups."""
    uplinks, groups = plan.exchange_uplinks, plan.exchange_groups
    if not uplinks:
        return
    key = "exchange_uplinks"
    if len(uplinks) != len(groups):
        yield Violation(
            (key,),
            f"exchange_uplinks has {len(uplinks)} lists, and exchange_groups {len(groups)}. Give a "
            "list for each group, or leave exchange_uplinks out for equal parts.",
        )
        return
    for number, (group, own) in enumerate(zip(groups, uplinks, strict=True)):
        if len(group) != len(own):
            yield Violation(
                (key, number),
                f"exchange_uplinks[{number}] has {len(own)} numbers, and exchange_groups[{number}] "
                f"{len(group)} machines. Give one number for each machine, in the same order.",
            )
            continue
        for machine, uplink in zip(group, own, strict=True):
            if uplink < 1:
                yield Violation(
                    (key, number),
                    f"exchange_uplinks[{number}] gives {machine} {uplink}; a relative bandwidth is "
                    "a whole number of 1 or more.",
                )


INVARIANTS = (
    devices_everywhere_or_nowhere,
    as_many_devices_as_ranks,
    each_device_in_one_place,
    hosts_are_sound,
    hosts_say_their_library,
    hosts_speak_one_library,
    hosts_hold_exactly_the_devices,
    stages_are_in_rank_order,
    last_rank_is_the_last_place,
    exchange_groups_are_of_the_hosts,
    exchange_uplinks_are_of_the_groups,
)
