"""`megatron-hetero launch`: the files that start a plan under the launcher of a site."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

from megatron_hetero.cli.arguments import add_master_port, check_new_folder
from megatron_hetero.cli.on_loss import add_loss_arguments, replanning_of
from megatron_hetero.cli.output import Output
from megatron_hetero.errors import CheckFailedError, EnvironmentMismatchError, UsageError
from megatron_hetero.files import write_json
from megatron_hetero.flags.environment import exports_left
from megatron_hetero.flags.gpu_needs import unmet_needs
from megatron_hetero.flags.launchers.install import find_wheel, install_script
from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob, SkyOptions, SlurmOptions
from megatron_hetero.flags.launchers.kubernetes import kubernetes_files
from megatron_hetero.flags.launchers.node_script import PLAN_NAME
from megatron_hetero.flags.launchers.replanning import CLUSTER_NAME, PROFILE_NAME
from megatron_hetero.flags.launchers.running import ACTIONS, RECORD_NAME, Action, record_of, steps
from megatron_hetero.flags.launchers.skypilot import sky_options, skypilot_files
from megatron_hetero.flags.launchers.slurm import slurm_files, slurm_options
from megatron_hetero.flags.launchers.ssh import ssh_files
from megatron_hetero.flags.launchers.torchrun import torchrun_files
from megatron_hetero.flags.needed import missing_in_job, missing_line
from megatron_hetero.flags.notes import unread_lines, unread_parts
from megatron_hetero.plan.file import load_plan
from megatron_hetero.serving.fleet.file import is_serving_plan, load_serving_plan
from megatron_hetero.serving.launch.folder import NOT_YET, TARGETS, fleet_files

DESCRIPTION = """\
Write the files that start a plan: a script that is the same on every node, and
the file of your launcher that runs it there, with the environment that each kind
of GPU needs.  Nothing is started.  Megatron flags that the plan does not know
(--data-path, --save, ...) may follow after --.

  megatron-hetero launch plan.json --for slurm -o job --partition gpu --time 12:00:00
  megatron-hetero launch --status job
  megatron-hetero launch serve.json --for vllm -o fleet    (a plan of serve-plan)

--status, --logs and --stop ask the launcher's own tools (squeue, sacct, scancel;
kubectl; sky; ssh) about the job of a folder that was written before."""
TAKES_MEGATRON_FLAGS = True

LAUNCHERS = {
    "torchrun": (torchrun_files, "run the lines of START.txt, each on its machine"),
    "ssh": (ssh_files, "bash {folder}/start.sh"),
    "slurm": (slurm_files, "bash {folder}/start.sh"),
    "kubernetes": (kubernetes_files, "kubectl apply -f {folder}/jobset.yaml"),
    "skypilot": (skypilot_files, "bash {folder}/start.sh"),
}

_NEEDS_COPIES = ("torchrun", "ssh", "slurm")
"""Launchers that find the folder on each machine; the others bring it there."""

_ACTION_HELP: dict[Action, str] = {
    "status": "what the job of a folder is doing",
    "logs": "the last lines of its logs",
    "stop": "stop it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `launch`."""
    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN.JSON", help="the plan")
    targets = tuple(dict.fromkeys((*LAUNCHERS, *TARGETS, *NOT_YET)))
    parser.add_argument(
        "--for", dest="launcher", choices=targets, metavar="LAUNCHER",
        help=f"what starts the job: {', '.join(LAUNCHERS)}; of a serving plan: "
        f"{', '.join(TARGETS)}",
    )  # fmt: skip
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for the files; it must not exist, or be empty",
    )
    parser.add_argument(
        "--script",
        metavar="PRETRAIN_GPT.PY",
        help="a pre-training script of your own (default: megatron_hetero.pretrain_gpt)",
    )
    parser.add_argument(
        "--name", default="megatron-hetero", help="name of the job (default: megatron-hetero)"
    )
    parser.add_argument(
        "--image",
        help="container image, for kubernetes and skypilot; for slurm, where it has pyxis",
    )
    parser.add_argument(
        "--wheel",
        help="the wheel of `make dist`, a path or an https URL: install.sh installs it on the "
        "machines, with the versions that it is tested with",
    )
    parser.add_argument(
        "--open-ports",
        action="store_true",
        help="skypilot: open the rendezvous and the ports of NCCL and gloo to every address, for "
        "machines that firewalls part inside one network; read SECURITY.md before",
    )
    parser.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="[MACHINE=]NAME",
        help="private network interface of all machines, or of one, such as eth1, that NCCL and "
        "gloo keep to; repeatable",
    )
    parser.add_argument(
        "--public-addresses",
        action="store_true",
        help="take machines that the cluster names by public addresses; read SECURITY.md before",
    )
    add_master_port(parser)
    add_loss_arguments(parser)
    _add_slurm_arguments(parser)
    _add_skypilot_arguments(parser)
    running = parser.add_mutually_exclusive_group()
    for action, text in _ACTION_HELP.items():
        running.add_argument(f"--{action}", type=Path, metavar="FOLDER", help=text)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="with --status, --logs, --stop: print the commands and run none",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("slurm")
    for name, text in (
        ("--partition", "partition of all nodes, or of those with a kind of GPU; may be repeated"),
        ("--cpus-per-task", "cores of a node's task, or of nodes with a kind of GPU; repeatable"),
    ):
        group.add_argument(name, action="append", default=[], metavar="[GPU-TYPE=]VALUE", help=text)
    group.add_argument("--account", help="account that the job is charged to")
    group.add_argument("--qos", help="quality of service")
    group.add_argument("--time", metavar="[DAYS-]HH:MM:SS", help="limit of the job's time")
    group.add_argument(
        "--requeue",
        action="store_true",
        help="put the job back into the queue when a node of it fails",
    )
    group.add_argument(
        "--container-mounts",
        metavar="/FOLDER:/FOLDER",
        help="with --image: folders of the machines in the container, beside the job's own",
    )


def _add_skypilot_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("skypilot")
    group.add_argument(
        "--infra",
        action="append",
        default=[],
        metavar="[GPU-TYPE=]CLOUD[/REGION]",
        help="where all machines are rented, or those with a kind of GPU; may be repeated",
    )
    group.add_argument(
        "--spot", action="store_true", help="rent machines that the cloud may take away"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the folder, or ask about the job of one."""
    for action in ACTIONS:
        folder = getattr(arguments, action)
        if folder is not None:
            if arguments.plan or arguments.launcher or arguments.output:
                raise UsageError(f"--{action} {folder} stands alone: the folder knows its job")
            return _run_steps(folder, action, arguments, output)
    if arguments.dry_run:
        raise UsageError("--dry-run goes with --status, --logs or --stop; the files start nothing")
    missing = [
        name
        for name, value in (
            ("PLAN.JSON", arguments.plan),
            ("--for", arguments.launcher),
            ("-o FOLDER", arguments.output),
        )
        if value is None
    ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} missing: launch PLAN.JSON --for LAUNCHER -o FOLDER, or launch "
            "--status FOLDER"
        )
    return _write_folder(arguments, output)


def _write_folder(arguments: argparse.Namespace, output: Output) -> int:
    folder: Path = arguments.output
    check_new_folder(folder, f"-o {folder}")
    if is_serving_plan(arguments.plan):
        return _write_fleet(arguments, output)
    if arguments.launcher not in LAUNCHERS:
        raise UsageError(
            f"--for {arguments.launcher} starts engines, and {arguments.plan} is a plan of "
            f"training; its launchers are {', '.join(LAUNCHERS)}"
        )
    wheel = find_wheel(arguments.wheel) if arguments.wheel is not None else None
    job = LaunchJob(
        load_plan(arguments.plan),
        arguments.name,
        arguments.script,
        tuple(arguments.megatron_args or ()),
        arguments.master_port,
        arguments.image,
        wheel is not None,
        arguments.open_ports,
        _slurm(arguments),
        tuple(_interface(text) for text in arguments.interface),
        arguments.public_addresses,
        replanning_of(arguments),
        _sky(arguments),
    )
    job.check()
    if arguments.open_ports and arguments.launcher != "skypilot":
        raise UsageError("--open-ports: only rented machines (--for skypilot) are opened here")
    parts = unread_parts(job.plan, job.more_flags)
    for note in (*unread_lines(parts), *unmet_needs(job.plan), *_left_exports(job)):
        output.note(note)
    left = [part.name for part in parts if part.name.startswith("--")]
    if left:
        output.note(
            f"the job starts without {', '.join(left)}; give them behind `--`, for example "
            f"-- {left[0]} VALUE"
        )
    missing = missing_in_job(job.plan.workload, job.more_flags)
    if missing:
        output.note(
            f"the job cannot start without {missing_line(missing)}. Give them behind `--`, or let "
            "`megatron-hetero init --job` write a script that has all of them and plan from it"
        )
    files_of, next_step = LAUNCHERS[arguments.launcher]
    files = [*files_of(job), *([install_script(wheel)] if wheel is not None else [])]
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        _write(folder, file)
    copied = {PLAN_NAME: arguments.plan}
    if job.replanning is not None:
        copied |= {CLUSTER_NAME: arguments.cluster, PROFILE_NAME: arguments.profile}
    for name, path in copied.items():
        if path is not None:
            shutil.copyfile(path, folder / name)
    written = [*(f.name for f in files), *(n for n, p in copied.items() if p), RECORD_NAME]
    write_json(folder / RECORD_NAME, record_of(job, arguments.launcher))
    if wheel is not None and wheel.path is not None:
        shutil.copyfile(wheel.path, folder / wheel.name)
        written.append(wheel.name)
    start = next_step.format(folder=folder)
    if arguments.json:
        output.json({"folder": str(folder), "files": written, "start": start})
        return 0
    output.show(f"Written to {folder}: {', '.join(written)}")
    if wheel is not None and arguments.launcher != "skypilot":
        output.show(f"Install: bash {folder}/install.sh, on each machine or on their shared disk")
    if len(job.plan.hosts) > 1 and arguments.launcher in _NEEDS_COPIES:
        output.show(
            f"Copy: {folder} to the same path on every machine, or have it on a shared disk"
        )
    output.show(f"Start: {start}")
    return 0


def _write_fleet(arguments: argparse.Namespace, output: Output) -> int:
    """Write the folder of a serving plan."""
    folder: Path = arguments.output
    if arguments.launcher not in (*TARGETS, *NOT_YET):
        raise UsageError(
            f"--for {arguments.launcher} starts training, and {arguments.plan} is a serving plan; "
            f"its targets are {', '.join(TARGETS)}"
        )
    files, next_step = fleet_files(load_serving_plan(arguments.plan), arguments.launcher)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        _write(folder, file)
    start, names = next_step.format(folder=folder), [file.name for file in files]
    if arguments.json:
        output.json({"folder": str(folder), "files": names, "start": start})
        return 0
    output.show(f"Written to {folder}: {', '.join(names)}", f"Start: {start}")
    return 0


def _left_exports(job: LaunchJob) -> tuple[str, ...]:
    """Return the notes on variables of the script; an interface that the command names is none."""
    left = exports_left(job.plan)
    return tuple(note for note in left if not (job.interfaces and "SOCKET_IFNAME=" in note))


def _interface(text: str) -> tuple[str, str]:
    machine, _, name = text.rpartition("=")
    return machine, name


def _slurm(arguments: argparse.Namespace) -> SlurmOptions:
    given = (arguments.partition, arguments.cpus_per_task)
    texts = (arguments.account, arguments.qos, arguments.time)
    more = (arguments.requeue, arguments.container_mounts)
    if arguments.launcher != "slurm" and (any(given) or any(texts) or any(more)):
        raise UsageError(
            "--partition, --cpus-per-task, --account, --qos, --time, --requeue and "
            "--container-mounts are Slurm's; they go with --for slurm"
        )
    if arguments.container_mounts and not arguments.image:
        raise UsageError("--container-mounts goes with --image, the container")
    return slurm_options(
        *given, *texts, requeue=arguments.requeue, mounts=arguments.container_mounts
    )


def _sky(arguments: argparse.Namespace) -> SkyOptions:
    if arguments.launcher != "skypilot" and (arguments.infra or arguments.spot):
        raise UsageError("--infra and --spot are SkyPilot's; they go with --for skypilot")
    return sky_options(arguments.infra, is_spot=arguments.spot)


def _run_steps(folder: Path, action: Action, arguments: argparse.Namespace, output: Output) -> int:
    """Run the steps of an action; show their output as it comes."""
    todo = steps(folder, action)
    if arguments.json:
        if not arguments.dry_run:
            raise UsageError(f"--{action} shows what the launcher's tools print; leave --json")
        output.json({"folder": str(folder), "commands": [list(step.argv) for step in todo]})
        return 0
    num_failed = 0
    for step in todo:
        if arguments.dry_run:
            output.verbatim(shlex.join(step.argv))
            continue
        if shutil.which(step.argv[0]) is None:
            text = f"there is no {step.argv[0]} here; run this where the job was started"
            if not step.may_fail:
                raise EnvironmentMismatchError(text)
            output.note(text)
            num_failed += 1
            continue
        code = subprocess.run(step.argv, cwd=folder, check=False).returncode
        num_failed += code != 0
        if code and not step.may_fail:
            raise CheckFailedError(f"{shlex.join(step.argv)} ended with exit code {code}")
    if num_failed and num_failed == len(todo):
        raise CheckFailedError(f"--{action} {folder}: none of its commands found the job")
    if action == "stop" and not arguments.dry_run and todo[0].argv[0] == "sky":
        names = " ".join(step.argv[-1] for step in todo)
        output.note(f"the machines stay rented; sky down {names} gives them back")
    return 0


def _write(folder: Path, file: LaunchFile) -> None:
    path = folder / file.name
    path.write_text(file.text, encoding="utf-8")
    if file.executable:
        path.chmod(0o755)
