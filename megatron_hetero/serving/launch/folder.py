"""The folder of a fleet: a script for each process, routers, weights, and how to start them."""

from __future__ import annotations

import json
import shlex

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import LaunchFile
from megatron_hetero.serving.fleet.file import serving_plan_data
from megatron_hetero.serving.fleet.plan import HandOver, ServingPlan
from megatron_hetero.serving.launch.ours import PLAN_NAME, is_ours, own_command, own_router
from megatron_hetero.serving.launch.pods import dynamo_files, llm_d_files
from megatron_hetero.serving.launch.processes import (
    EngineCommand,
    EngineProcess,
    address,
    processes_of,
)
from megatron_hetero.serving.launch.sglang import sglang_command, sglang_routers
from megatron_hetero.serving.launch.skypilot import skypilot_service
from megatron_hetero.serving.launch.vllm import vllm_command, vllm_routers

TARGETS = ("vllm", "sglang", "ssh", "skypilot", "llm-d", "dynamo")
TARGETS_OF_PODS = ("llm-d", "dynamo")
"""Targets whose pods run in an image."""

_HERE = 'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"\n'
"""Of scripts that name a file beside them."""
_START = """\
#!/usr/bin/env bash
# Starts every process of the fleet over ssh, from a machine that reaches all of them:
#
#   bash start.sh
#
# This folder lies at the same path on all of them, or FOLDER says where.  Ctrl-C stops all.  A log
# of each comes to logs/ here.  When one ends, it is named, and the others go on.
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
folder=${{FOLDER:-$here}}
mkdir -p -- "$here/logs"
names=({names})
hosts=({hosts})
starters=()
stop() {{
    kill "${{starters[@]}}" 2>/dev/null || true
    wait || true
}}
trap 'stop; exit 130' INT TERM
for i in "${{!names[@]}}"; do
    # -tt: a remote process ends with its connection, so that stopping here stops it there.
    ssh -tt -o BatchMode=yes "${{hosts[$i]}}" \\
        "cd -- $(printf %q "$folder") && exec bash $(printf %q "${{names[$i]}}").sh" \\
        </dev/null >"$here/logs/${{names[$i]}}.log" 2>&1 &
    starters+=("$!")
done
for i in "${{!names[@]}}"; do
    if ! wait "${{starters[$i]}}"; then
        echo "start.sh: ${{names[$i]}} ended; see $here/logs/${{names[$i]}}.log" >&2
    fi
done
"""


def fleet_files(
    plan: ServingPlan, target: str, image: str | None = None
) -> tuple[tuple[LaunchFile, ...], str]:
    """Return the files for a target, and the command to start the fleet, with {folder} inside.

    Args:
        plan: the fleet.
        target: one of `TARGETS`.
        image: of pods; None is the one of the target's own recipes.
    Raises:
        UnsupportedError: a plan that the target cannot run.
        UsageError: the plan was made for another engine.
    """
    # Orchestrators start engines themselves from a manifest.
    if target == "llm-d":
        start = "kubectl apply -f {folder}/fleet.yaml, then llm-d's router chart with each values"
        return (*llm_d_files(plan, image), _routes(plan, ())), start
    if target == "dynamo":
        manifests = (*dynamo_files(plan, image), _routes(plan, ()))
        return manifests, "kubectl apply -f {folder}/fleet.yaml"
    if target == "skypilot":
        return (skypilot_service(plan), _routes(plan, ())), "sky serve up {folder}/service.yaml"
    # Over ssh the engine that the plan was made for is started.
    engine = plan.engine.name if target == "ssh" else target
    if plan.engine.name not in (engine, "any"):
        raise UsageError(
            f"--for {target}: the plan was made for {plan.engine.name}, whose memory and steps it "
            f"counts on; plan with --engine {target}"
        )
    processes = processes_of(plan, with_ours=target == "ssh")
    is_vllm = engine != "sglang"
    engine_command = vllm_command if is_vllm else sglang_command
    files = []
    # Replicas that no engine runs are started by our own command.
    for process in processes:
        command_of = own_command if is_ours(process) else engine_command
        files.append(_script(process, command_of(plan, process)))
    if any(map(is_ours, processes)):
        # Theirs take no weights, and unlike replicas need them: one router for all.
        routers = {"both": own_router(plan, processes)}
        text = json.dumps(serving_plan_data(plan), indent=2, sort_keys=True) + "\n"
        files.append(LaunchFile(PLAN_NAME, text))
    else:
        routers = (vllm_routers if is_vllm else sglang_routers)(plan, processes)
    # One script for the router of each route, and of each group of hand-overs.
    names = {
        phase: f"router{phase.removeprefix('both').replace('prefill', '-prefill-decode')}.sh"
        for phase in routers
    }
    for phase, argv in routers.items():
        here = _HERE if PLAN_NAME in argv else ""
        text = f"#!/usr/bin/env bash\nset -euo pipefail\n{here}exec {shlex.join(argv)}\n"
        files.append(LaunchFile(names[phase], text, executable=True))
    files.append(_routes(plan, processes))
    # Over ssh a single script starts all; otherwise the user starts each line.
    if target == "ssh":
        text = _START.format(
            names=" ".join(shlex.quote(p.name) for p in processes),
            hosts=" ".join(shlex.quote(p.host) for p in processes),
        )
        files.append(LaunchFile("start.sh", text, executable=True))
        return tuple(files), "bash {folder}/start.sh, then its routers"
    lines = "".join(f"{p.host}: bash {p.name}.sh\n" for p in processes)
    lines += "".join(f"router: bash {names[phase]}\n" for phase in routers)
    files.append(LaunchFile("START.txt", lines))
    return tuple(files), "run the lines of {folder}/START.txt, each on its machine"


def _script(process: EngineProcess, command: EngineCommand) -> LaunchFile:
    """Return the script of one process: its replica and its command."""
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in command.environment.items()
    )
    # Our own command reads the plan beside the script.
    here = _HERE if PLAN_NAME in command.argv else ""
    text = (
        f"#!/usr/bin/env bash\n# {process.replica.phase}: {process.replica.shape}\n"
        f"set -euo pipefail\n{here}{exports}exec {shlex.join(command.argv)}\n"
    )
    return LaunchFile(f"{process.name}.sh", text, executable=True)


def _routes(plan: ServingPlan, processes: tuple[EngineProcess, ...]) -> LaunchFile:
    """Return what each replica is to get: requests per second of each class, for any router."""
    # Only the first process of a replica listens.
    urls = {p.replica.name: address(p) for p in processes if p.rank == 0}
    names = [kind.name for kind in plan.classes]
    replicas = []
    for replica in plan.replicas:
        where = {"url": urls[replica.name]} if replica.name in urls else {}
        rates = dict(zip(names, replica.rates, strict=True))
        replicas.append(
            {"name": replica.name, "phase": replica.phase, **where, "requests_per_s": rates}
        )
    data: dict[str, object] = {"classes": names, "replicas": replicas}
    if plan.hand_overs:
        data["hand_overs"] = [_hand_over(plan, pair) for pair in plan.hand_overs]
    text = json.dumps(data, indent=2) + "\n"
    return LaunchFile("routes.json", text)


def _hand_over(plan: ServingPlan, pair: HandOver) -> dict[str, object]:
    """Return which replicas hand over to which, and how much of each class."""
    sides = ("prefill", pair.sender), ("decode", pair.receiver)
    names = [kind.name for kind in plan.classes]
    return {
        **{
            phase: [r.name for r in plan.replicas if (r.phase, r.place) == (phase, place)]
            for phase, place in sides
        },
        "requests_per_s": dict(zip(names, pair.rates, strict=True)),
    }
