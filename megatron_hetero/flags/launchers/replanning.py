"""Going on without lost machines: what `start.sh` does where the job asks for it.

`launch --hetero-on-loss replan` writes these lines of `start.sh`: they look which machines still
answer, call `plan --near` and `launch` as a person would, and start what came out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.plan.plan import Plan

CLUSTER_NAME = "cluster.yaml"
PROFILE_NAME = "profile.json"
FLAG = ("--hetero-on-loss", "replan")
WATCH_CONNECTION = "-o ServerAliveInterval=15 -o ServerAliveCountMax=8 "
"""Options of ssh that end a connection whose other end has been silent for two minutes: where a
machine is gone, and no rank elsewhere says so, nothing else would."""
_TRACKER = "latest_checkpointed_iteration.txt"

GO_ON = """\
# Every machine of {cluster}, and its address; one that does not answer now counts as lost.
machines=({machines})
addresses=({addresses})
# In the plan that runs:
used=" {used} "

# Sets what `plan` leaves out, and the lost machines of the plan; fails where nobody answers.
ask_machines() {{
    local answers=()
    without=() is_lost=""
    for i in "${{!machines[@]}}"; do
        ssh -o BatchMode=yes -o ConnectTimeout=10 "${{addresses[$i]}}" true \\
            </dev/null >/dev/null 2>&1 &
        answers+=("$!")
    done
    for i in "${{!machines[@]}}"; do
        if ! wait "${{answers[$i]}}"; then
            without+=(--without "${{machines[$i]}}")
            case "$used" in *" ${{machines[$i]}} "*) is_lost+=" ${{machines[$i]}}" ;; esac
        fi
    done
    [ "${{#without[@]}}" -lt $((2 * ${{#machines[@]}})) ]
}}

go_on() {{
    # Rather the network from here than all machines at once.
    until ask_machines; do
        echo "start.sh: no machine of {cluster} answers; asking again in 30 s" >&2
        sleep 30
    done
    if [ -z "$is_lost" ]; then
        if ! (cd -- "$here" && [ {tracker} -nt {pid} ]); then
            echo "start.sh: all machines answer, and nothing was saved since the start:" \\
                "the job is not started again. See $here/logs" >&2
            exit 1
        fi
        echo "start.sh: all machines answer: the same plan is started again" >&2
        sleep 5 # for the old processes to end
    else
        echo "start.sh: lost:$is_lost; planning for the others" >&2
        rm -rf -- "$here/next" "$here/next.json"
        {plan} "${{without[@]}}" >&2
        {launch} >/dev/null
        mv -- "$here/{plan_name}" "$here/plan-before-$(date +%s).json"
        mv -- "$here"/next/* "$here"
        rm -r -- "$here/next" "$here/next.json"
    fi
    old_logs=$here/logs-$(date +%s)
    mv -- "$here/logs" "$old_logs"
    echo "start.sh: starting again; the logs of the start that failed: $old_logs" >&2
    exec bash "$here/start.sh"
}}
"""


@dataclass(frozen=True)
class OnLoss:
    """What a job needs to be planned again: all machines of its cluster, as (name, address), and
    whether a profile lies beside its file."""

    machines: tuple[tuple[str, str], ...]
    has_profile: bool = False

    @staticmethod
    def on(cluster: Cluster, *, has_profile: bool) -> OnLoss:
        """Return the replanning of a job on a cluster."""
        pairs = ((name, islands[0].host) for name, islands in cluster.machines.items())
        return OnLoss(tuple(pairs), has_profile)

    def check(self, plan: Plan, more_flags: Sequence[str]) -> None:
        """Refuse a job that could not go on.

        Raises:
            UsageError: a machine of the plan is not in the cluster, the plan has no model, or
                the job does not go on from what it saves.
        """
        # A machine that the cluster file lacks could never be planned again.
        for host in plan.hosts:
            if (host.node, host.host) not in self.machines:
                raise UsageError(
                    f"--cluster: the plan has the machine {host.node} at {host.host}, which is not "
                    "in it; name the file that the plan was made for"
                )
        if plan.workload is None:
            raise UsageError(
                "--hetero-on-loss replan: the plan does not say which model it is for, so nobody "
                "could plan again; plan with --model"
            )
        # Without one folder for both the job would start from the beginning.
        saved, loaded = (_given(plan, more_flags, flag) for flag in ("--save", "--load"))
        interval = _given(plan, more_flags, "--save-interval")
        if saved is None or saved != loaded or interval is None:
            raise UsageError(
                "--hetero-on-loss replan: the job has to go on from what it saves; give "
                "--save-interval, and --save and --load with one folder, on a disk that all "
                f"machines share (--save is {saved}, --load {loaded}, --save-interval {interval})"
            )

    def lines(
        self, plan: Plan, more_flags: Sequence[str], options: Sequence[str], *, plan_name: str,
        pid_name: str,
    ) -> str:  # fmt: skip
        """Write the function `go_on`.

        Args:
            plan: the plan of this start.
            more_flags: Megatron's flags that the plan does not know.
            options: of `launch`, beside the plan and its folder.
            plan_name, pid_name: files of the folder.
        """
        # Megatron's tracker tells whether anything was saved since the start.
        saved = _given(plan, more_flags, "--save") or ""
        profile = f' --profile "$here/{PROFILE_NAME}"' if self.has_profile else ""
        cluster = f'--cluster "$here/{CLUSTER_NAME}"{profile}'
        return GO_ON.format(
            cluster=CLUSTER_NAME,
            machines=shlex.join(name for name, _ in self.machines),
            addresses=shlex.join(address for _, address in self.machines),
            used=" ".join(host.node for host in plan.hosts),
            tracker=shlex.quote(f"{saved.rstrip('/')}/{_TRACKER}"),
            pid=pid_name,
            plan=f'megatron-hetero plan --near "$here/{plan_name}" {cluster} -o "$here/next.json"',
            launch=f'megatron-hetero launch "$here/next.json" -o "$here/next" {cluster} '
            + shlex.join([*FLAG, *options, *_behind_dashes(more_flags)]),
            plan_name=plan_name,
        )


def _behind_dashes(more_flags: Sequence[str]) -> Iterator[str]:
    if more_flags:
        yield "--"
        yield from more_flags


def _given(plan: Plan, more_flags: Sequence[str], name: str) -> str | None:
    """Return the value of a flag of the job; the last one counts."""
    of_plan = () if plan.workload is None else plan.workload.megatron_args
    for option in last_of_each(flag_table().split((*of_plan, *more_flags))):
        if name in option.flag.names and option.values:
            return option.values[0]
    return None
