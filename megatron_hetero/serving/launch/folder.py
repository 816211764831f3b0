"""The folder of a fleet: a script for each process, routers, weights, and how to start them."""

from __future__ import annotations

import json
import shlex

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.launchers.job import LaunchFile
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.launch.processes import (
    EngineCommand,
    EngineProcess,
    address,
    processes_of,
)
from megatron_hetero.serving.launch.sglang import sglang_command, sglang_routers
from megatron_hetero.serving.launch.skypilot import skypilot_service
from megatron_hetero.serving.launch.vllm import vllm_command, vllm_routers

TARGETS = ("vllm", "sglang", "ssh", "skypilot")
NOT_YET = ("llm-d", "dynamo")

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


def fleet_files(plan: ServingPlan, target: str) -> tuple[tuple[LaunchFile, ...], str]:
    """Return the files for a target, and the command to start the fleet, with {folder} inside.

    Raises:
        UnsupportedError: a target, or a plan, whose files are not written yet.
        UsageError: the plan was made for another engine.
    """
    if target in NOT_YET:
        raise UnsupportedError(
            f"--for {target}: its manifests are not written yet; --for vllm writes each replica's "
            "command line, which its pods run, and routes.json the weights"
        )
    if target == "skypilot":
        return (skypilot_service(plan), _routes(plan, ())), "sky serve up {folder}/service.yaml"
    engine = plan.engine.name if target == "ssh" else target
    if plan.engine.name not in (engine, "any"):
        raise UsageError(
            f"--for {target}: the plan was made for {plan.engine.name}, whose memory and steps it "
            f"counts on; plan with --engine {target}"
        )
    processes = processes_of(plan)
    is_vllm = engine != "sglang"
    command_of = vllm_command if is_vllm else sglang_command
    files = [_script(process, command_of(plan, process)) for process in processes]
    routers = (vllm_routers if is_vllm else sglang_routers)(plan, processes)
    names = {"both": "router.sh", "prefill": "router-prefill-decode.sh"}
    for phase, argv in routers.items():
        text = f"#!/usr/bin/env bash\nexec {shlex.join(argv)}\n"
        files.append(LaunchFile(names[phase], text, executable=True))
    files.append(_routes(plan, processes))
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
    text = (
        f"#!/usr/bin/env bash\n# {process.replica.phase}: {process.replica.shape}\n"
        f"set -euo pipefail\n{exports}exec {shlex.join(command.argv)}\n"
    )
    return LaunchFile(f"{process.name}.sh", text, executable=True)


def _routes(plan: ServingPlan, processes: tuple[EngineProcess, ...]) -> LaunchFile:
    """Return what each replica is to get: requests per second of each class, for any router."""
    urls = {p.replica.name: address(p) for p in processes if p.rank == 0}
    names = [kind.name for kind in plan.classes]
    replicas = []
    for replica in plan.replicas:
        where = {"url": urls[replica.name]} if replica.name in urls else {}
        rates = dict(zip(names, replica.rates, strict=True))
        replicas.append(
            {"name": replica.name, "phase": replica.phase, **where, "requests_per_s": rates}
        )
    text = json.dumps({"classes": names, "replicas": replicas}, indent=2) + "\n"
    return LaunchFile("routes.json", text)
