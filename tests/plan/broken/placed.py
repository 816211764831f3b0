"""Plans whose devices and hosts break one invariant each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_hetero.plan.checks import devices as check_devices
from megatron_hetero.plan.plan import (
    Plan,
)
from tests.plan.edits import (
    PLAN,
    with_context,
    with_host,
    with_stage,
)

BROKEN: dict[Callable[..., Any], list[tuple[Plan, str]]] = {
    check_devices.devices_everywhere_or_nowhere: [
        (with_stage(PLAN, 0, 1, devices=()), "replica 0, stage 1 names no devices"),
        (replace(PLAN, hosts=()), "stages name devices, but the plan has no hosts"),
    ],
    check_devices.as_many_devices_as_ranks: [
        (
            with_stage(PLAN, 0, 0, devices=("a:0", "a:1", "a:2")),
            "replica 0, stage 0 names 3 devices for tensor-parallel width 4",
        ),
    ],
    check_devices.each_device_in_one_place: [
        (
            with_stage(PLAN, 1, 0, devices=("b:0",)),
            "device b:0 is in replica 1, stage 0 and in replica 0, stage 1",
        ),
        (replace(PLAN, idle_devices=("b:2",)), "device b:2 is idle and in replica 1, stage 0"),
        (replace(PLAN, idle_devices=("b:1", "b:1")), "device b:1 is listed 2 times"),
        (replace(PLAN, idle_devices=()), "idle_reasons explains b:1"),
    ],
    check_devices.hosts_are_sound: [
        (with_host(PLAN, 0, host="-oProxyCommand=x"), "'-oProxyCommand=x' .* not a host name"),
        (with_host(PLAN, 0, host="a b"), "not a host name"),
        (with_host(PLAN, 0, host="a\n"), "not a host name"),
        (with_host(PLAN, 1, node="a"), "machine a is listed twice"),
        (with_host(PLAN, 1, gpu_indices=()), "machine b gives no GPU"),
        (with_host(PLAN, 1, gpu_indices=(0, 2, 2)), "GPU index 2 of machine b is listed twice"),
        (with_host(PLAN, 1, gpu_indices=(-1, 2)), "GPU index -1 of machine b is negative"),
    ],
    check_devices.hosts_say_their_library: [
        (
            with_host(PLAN, 1, gpu_type="MY-CARD"),
            "machine b has MY-CARD, .* name shows no maker, and the plan does not say its",
        ),
    ],
    check_devices.hosts_speak_one_library: [
        (
            with_host(PLAN, 0, gpu_type="MI300X"),
            r"libraries are mixed: RCCL of AMD on a \(MI300X\)",
        ),
        (with_host(PLAN, 1, library="RCCL"), r"and RCCL of AMD on b \(RTX-4090\)"),
        (
            with_host(PLAN, 1, gpu_type="Gaudi-2"),
            r"node b cannot be in a job: Gaudi-2 \(library: HCCL\) is",
        ),
    ],
    check_devices.hosts_hold_exactly_the_devices: [
        (with_host(PLAN, 1, gpu_indices=(2,)), "device b:0 of replica 0, stage 1 is on no host"),
        (with_host(PLAN, 1, gpu_indices=(0, 3, 2)), "starts a process for GPU 3, which is in no"),
    ],
    check_devices.stages_are_in_rank_order: [
        (
            with_host(PLAN, 0, gpu_indices=(1, 0, 2, 3)),
            "a:0, a:1, a:2, a:3 are not in rank order; .* it is a:1, a:0, a:2, a:3",
        ),
    ],
    check_devices.last_rank_is_the_last_place: [
        (
            with_host(PLAN, 1, gpu_indices=(2, 0)),
            "the last global rank is b:0, but .* last replica, b:2",
        ),
        (replace(PLAN, hosts=PLAN.hosts[::-1]), "the last global rank is a:3"),
    ],
    check_devices.exchange_groups_are_of_the_hosts: [
        (replace(PLAN, exchange_groups=(("a", "b"),)), "one group, which is none"),
        (replace(PLAN, exchange_groups=(("a",), ("b",), ())), r"\[2\] names no machine"),
        (replace(PLAN, exchange_groups=(("a",), ("b", "z"))), "names z, which is no machine"),
        (replace(PLAN, exchange_groups=(("a",), ("b", "a"))), "a is in exchange_groups"),
        (replace(PLAN, exchange_groups=(("a",), ("a",))), "b is in none of the exchange_groups"),
        (
            replace(with_context(PLAN, 1), exchange_groups=(("a",), ("b",))),
            "the plan has no hosts",
        ),
    ],
    check_devices.exchange_uplinks_are_of_the_groups: [
        (
            replace(PLAN, exchange_uplinks=((1,), (2,))),
            r"has 2 lists, and exchange_groups 0. Give a list for each group, or leave",
        ),
        (
            replace(PLAN, exchange_groups=(("a",), ("b",)), exchange_uplinks=((1,), (2, 3))),
            r"\[1\] has 2 numbers, and exchange_groups\[1\] 1 machines",
        ),
        (
            replace(PLAN, exchange_groups=(("a",), ("b",)), exchange_uplinks=((1,), (0,))),
            r"\[1\] gives b 0; a relative bandwidth is a whole number of 1 or more",
        ),
    ],
}
