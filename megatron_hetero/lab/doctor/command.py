"""`megatron-hetero doctor --on-cluster` behind the command line; every rank of the launch runs it.

    torchrun <as flags prints it> -m megatron_hetero doctor plan.json --cluster ... --on-cluster

The ranks publish what they see of their machines, then pass known values through every group of the
plan, one group after the other, each within a time limit.  The first group that fails ends the
tests, because a communicator that hangs takes its GPU with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hetero.cluster.names import device_place
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.lab.doctor.exchange import HangError, WrongValueError, run_test
from megatron_hetero.lab.doctor.facts import collect_facts
from megatron_hetero.lab.doctor.meeting import Meeting
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.preflight.check import check_job
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.groups import GroupTest, group_tests
from megatron_hetero.preflight.job import Job
from megatron_hetero.preflight.machine import MachineFacts
from megatron_hetero.preflight.machine_checks import check_machines
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.one_machine import LOCAL_STORE

_MEET_S = 120.0
"""Limit for the start of all ranks."""
_GRACE_S = 10.0


@dataclass(frozen=True)
class CheckOutcome:
    """Result of the preflight on one rank.

    On rank 0 it has everything that was gathered; on other ranks `findings` are those that all
    ranks have reported.
    """

    rank: int
    findings: tuple[Finding, ...]
    facts: tuple[MachineFacts, ...]
    tested: tuple[str, ...]


def examine_machines(
    plan: Plan, cluster: Cluster, limit_s: float, meet_s: float = _MEET_S
) -> CheckOutcome:
    """Run this rank's part of the preflight on machines. Collective over all ranks of the plan.

    Args:
        plan: a plan that is valid on `cluster`.
        cluster: the cluster of the plan.
        limit_s: limit of each exchange of values, in seconds.
        meet_s: limit for all ranks to start, in seconds.
    Raises:
        EnvironmentMismatchError: the launch has another number of processes, or no store.
    """
    # All ranks bring the facts of their machines.
    meeting = _meet(plan, meet_s)
    facts = collect_facts(meeting.rank, None if plan.workload is None else plan.workload.model)
    meeting.publish("facts", facts.model_dump_json())
    texts = meeting.gather("facts", meet_s)
    found = tuple(MachineFacts.model_validate_json(texts[rank]) for rank in sorted(texts))
    findings: tuple[Finding, ...]
    # Without some of them, say which.
    if len(found) < meeting.size:
        missing = ", ".join(str(r) for r in range(meeting.size) if r not in texts)
        findings = (
            Finding("rank-missing", "error", f"ranks {missing}",
                    f"did not come within {meet_s:g} s",
                    "look at the output of their nodes; start every line that `flags` prints"),
        )  # fmt: skip
        return CheckOutcome(meeting.rank, findings, found, ())
    # Judge machines and job, then try the groups.
    job = Job(plan, cluster, _environment(plan, found))
    findings = check_machines(job, found)
    if backend.cuda_is_usable():  # elsewhere it is a rehearsal, whose environment is not the job's
        findings = (*check_job(job), *findings)
    tested = _exchange_values(plan, meeting, limit_s)
    # Who waited longest may still be writing its report.
    meeting.arrive("done", limit_s + _GRACE_S, patience_s=limit_s)
    return CheckOutcome(meeting.rank, (*findings, *meeting.findings()), found, tested)


def _environment(plan: Plan, facts: Sequence[MachineFacts]) -> dict[str, dict[str, str]]:
    """Return the environment of each node's processes (torchrun gives all the same)."""
    places = rank_table(plan)
    devices = {fact.rank: places[fact.rank].device for fact in facts}
    return {
        device_place(device)[0]: fact.environment
        for fact in facts
        if (device := devices[fact.rank]) is not None
    }


def leave(meeting_is_broken: bool, exit_code: int) -> int:
    """End a process whose communicators may hang: their destructors could wait for ever."""
    if meeting_is_broken:
        os._exit(exit_code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return exit_code


def _meet(plan: Plan, meet_s: float) -> Meeting:
    # A process that no launcher started has neither variable, and is a launch of one.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    wanted = plan.layout.num_devices
    if size != wanted:
        raise EnvironmentMismatchError(
            f"the plan has {wanted} devices, one process each, but this launch has {size} "
            "(WORLD_SIZE). Start it as `megatron-hetero flags` starts the job, with "
            "`-m megatron_hetero doctor PLAN.JSON --cluster CLUSTER.YAML --on-cluster` in the "
            "place of the entry."
        )
    path = os.environ.get(LOCAL_STORE)
    timeout = timedelta(seconds=meet_s)
    try:
        # Ranks on one machine may meet through a file, which needs no port.
        if path:
            store = dist.FileStore(path, size)
        else:
            store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise EnvironmentMismatchError(
            f"rank {rank} cannot reach the rendezvous at {os.environ.get('MASTER_ADDR', '?')}:"
            f"{os.environ.get('MASTER_PORT', '?')}: {error}. Check that address and port from this "
            "node, and its firewall."
        ) from error
    # The prefix keeps these keys apart from the keys that torch puts into the same store.
    store.set_timeout(timeout)
    return Meeting(dist.PrefixStore("doctor", store), rank, size)


def _exchange_values(plan: Plan, meeting: Meeting, limit_s: float) -> tuple[str, ...]:
    """Test every group, in one order on all ranks; return the names of the groups that passed."""
    on_gpu = backend.cuda_is_usable()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    limit = timedelta(seconds=limit_s)
    # Meet as training would, with a short limit.
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("groups", meeting.store),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=limit,
        )
    except RuntimeError as error:
        meeting.report(_finding("collective-failed", "the whole job", _first_line(error)))
        return ()
    passed = []
    # Group by group, so that the first fault names its group.
    for number, test in enumerate(group_tests(plan)):
        try:
            # `new_group` is collective over the world: ranks outside of the group call it too.
            group = dist.new_group(test.ranks, timeout=limit)
            if meeting.rank in test.ranks:
                run_test(test, group, device, limit_s)
        except HangError as error:
            meeting.report(_hang(test, str(error)))
        except WrongValueError as error:
            kind = "collective" if test.kind == "collective" else "message"
            where = f"{test.name}, rank {meeting.rank}"
            meeting.report(_finding(f"{kind}-wrong-values", where, str(error)))
        except RuntimeError as error:
            meeting.report(_finding("collective-failed", test.name, _first_line(error)))
        # All ranks come back from the test before the next one.
        came = meeting.arrive(f"test/{number}", limit_s + _GRACE_S, patience_s=limit_s)
        # A rank that hangs reports nothing itself, so the ranks that came name the late ones.
        if not came and not meeting.has_findings:
            late = ", ".join(map(str, meeting.absent(f"test/{number}")))
            meeting.report(_hang(test, f"ranks {late} did not come back"))
        if meeting.has_findings:
            break
        passed.append(test.name)
    return tuple(passed)


def _hang(test: GroupTest, what: str) -> Finding:
    kind = "collective" if test.kind == "collective" else "message"
    return _finding(f"{kind}-hangs", test.name, what)


def _finding(id_: str, where: str, what: str) -> Finding:
    if "wrong" in id_:
        remedy = (
            "do not train: set NCCL_P2P_DISABLE=1 (GPUs of one machine) or NCCL_ALGO=Ring and "
            "another NCCL_PROTO, or another NCCL release, and run doctor again"
        )
    else:
        remedy = (
            "run again with NCCL_DEBUG=INFO; inside a machine try NCCL_P2P_DISABLE=1, between "
            "machines NCCL_SOCKET_IFNAME and one NCCL_ALGO and NCCL_PROTO on every node"
        )
    return Finding(id_, "error", where, what, remedy)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
