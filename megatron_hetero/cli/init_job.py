"""`megatron-hetero init --job`: a starter script of a training job."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_hetero.cli.discover import write_new
from megatron_hetero.cli.init_options import check_job
from megatron_hetero.cli.output import Output
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.job_script import MISSING, USUAL_BATCH, job_script
from megatron_hetero.model.load import load_arguments, load_workload


def write_job(arguments: argparse.Namespace, output: Output) -> int:
    """Write the script and check that `plan` can read the script."""
    check_job(arguments)
    if arguments.model is None and not arguments.megatron_args:
        raise UsageError(
            "--job needs the model: --model FILE (a Hugging Face config.json, a Megatron script, a "
            "file of its flags), or Megatron's flags behind `--`"
        )
    path = arguments.output or Path("train.sh")
    job = load_arguments(
        arguments.model, arguments.megatron_args, environment=dict(arguments.model_env)
    )
    # What is wrong is said of the user's own file, before a script is written of it.
    given = {argument.flag for argument in job.arguments}
    usual = [words.split() for words in USUAL_BATCH if words.split()[0] not in given]
    load_workload(
        arguments.model,
        [*(arguments.megatron_args or ()), *(word for words in usual for word in words)],
        environment=dict(arguments.model_env),
    )
    text = job_script(job.arguments, job.source, path.name)
    write_new(path, text)
    try:
        load_workload(path)
    except Exception:
        path.unlink()
        raise
    # A shell may start the script as it is.
    path.chmod(0o755)
    state = "fill in what is MISSING there" if MISSING in text else "nothing is missing"
    output.show(f"Written to {path}; {state}.")
    output.show(f"Next: megatron-hetero plan --cluster cluster.yaml --model {path} -o plan.json")
    return 0
