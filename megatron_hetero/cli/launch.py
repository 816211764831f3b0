"""`megatron-hetero launch`: the files that start a plan under the launcher of a site."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from megatron_hetero.cli.arguments import add_master_port, check_new_folder
from megatron_hetero.cli.output import Output
from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.kubernetes import kubernetes_files
from megatron_hetero.flags.launchers.node_script import PLAN_NAME
from megatron_hetero.flags.launchers.skypilot import skypilot_files
from megatron_hetero.flags.launchers.slurm import slurm_files
from megatron_hetero.flags.launchers.ssh import ssh_files
from megatron_hetero.flags.launchers.torchrun import torchrun_files
from megatron_hetero.model.megatron_flags import flags_left_to_the_shell
from megatron_hetero.plan.file import load_plan

DESCRIPTION = """\
Write what starts a plan: a script that is the same on every node, and the file
of your launcher that runs it there, with the environment that each kind of GPU
needs.  Nothing is started.  Megatron flags that the plan does not know
(--data-path, --save, ...) may follow after --."""
TAKES_MEGATRON_FLAGS = True

LAUNCHERS = {
    "torchrun": (torchrun_files, "run the lines of START.txt, each on its machine"),
    "ssh": (ssh_files, "bash {folder}/start.sh"),
    "slurm": (slurm_files, "cd {folder} && sbatch job.sbatch"),
    "kubernetes": (kubernetes_files, "kubectl apply -f {folder}/jobset.yaml"),
    "skypilot": (skypilot_files, "bash {folder}/start.sh"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `launch`."""
    parser.add_argument("plan", type=Path, metavar="PLAN.JSON", help="the plan")
    parser.add_argument(
        "--for", dest="launcher", choices=LAUNCHERS, required=True, help="what starts the job"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
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
    parser.add_argument("--image", help="container image, for kubernetes and skypilot")
    add_master_port(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the folder."""
    folder: Path = arguments.output
    check_new_folder(folder, f"-o {folder}")
    job = LaunchJob(
        load_plan(arguments.plan),
        arguments.name,
        arguments.script,
        tuple(arguments.megatron_args or ()),
        arguments.master_port,
        arguments.image,
    )
    job.check()
    left = flags_left_to_the_shell(job.plan.workload) if job.plan.workload else ()
    given = {word.partition("=")[0] for word in job.more_flags}
    left = tuple(flag for flag in left if flag not in given)
    if left:
        output.note(
            f"the script takes {', '.join(left)} from shell variables, whose values the plan does "
            f"not have: the job starts without. Give them behind `--`, for example -- {left[0]} "
            "VALUE"
        )
    files_of, next_step = LAUNCHERS[arguments.launcher]
    files = files_of(job)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        _write(folder, file)
    shutil.copyfile(arguments.plan, folder / PLAN_NAME)
    written = [*(file.name for file in files), PLAN_NAME]
    start = next_step.format(folder=folder)
    if arguments.json:
        output.json({"folder": str(folder), "files": written, "start": start})
    else:
        output.show(f"Written to {folder}: {', '.join(written)}")
        output.show(f"Start: {start}")
    return 0


def _write(folder: Path, file: LaunchFile) -> None:
    path = folder / file.name
    path.write_text(file.text, encoding="utf-8")
    if file.executable:
        path.chmod(0o755)
