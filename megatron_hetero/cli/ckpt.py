"""`megatron-hetero ckpt`: Hugging Face weights to Megatron checkpoints, and back."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from megatron_hetero.cli.arguments import check_new_folder
from megatron_hetero.cli.output import Output
from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.model.huggingface.weight_families import families_in_words

_FAMILIES = textwrap.fill(
    f"Families: {families_in_words()}.  Runs on this machine's CPU with the model in memory once.  "
    "A checkpoint of a plan needs no export for stock Megatron, which reads it as it is.",
    width=80,
    break_on_hyphens=False,
)
DESCRIPTION = f"""\
Start from the weights of a Hugging Face folder, or write one.

  ckpt import HF_FOLDER CHECKPOINT            a checkpoint for --load
  ckpt export CHECKPOINT HF_FOLDER --config CONFIG.JSON

{_FAMILIES}"""
TAKES_MEGATRON_FLAGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `ckpt`."""
    parser.add_argument("action", choices=("import", "export"), help="into Megatron, or out")
    parser.add_argument("source", type=Path, metavar="FROM", help="the folder to read")
    parser.add_argument("target", type=Path, metavar="TO", help="the folder to write")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG.JSON",
        help="export: the config.json of the model, which is copied into the folder",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Convert in a separate process that sees no GPU."""
    # Refuse what the process would refuse later.
    source, target = arguments.source, arguments.target
    check_new_folder(target, str(target))
    words = [arguments.action, str(source), str(target)]
    if arguments.action == "import":
        if arguments.config is not None:
            raise UsageError("--config goes with export; import reads the config.json of FROM")
        if not (source / "config.json").is_file():
            raise UsageError(f"{source}: no config.json; give the folder of a Hugging Face model")
    elif arguments.config is None or not arguments.config.is_file():
        raise UsageError("--config: name the config.json of the model, which says its family")
    else:
        words.append(str(arguments.config))
    # Looked up and not imported: this process stays without torch.
    for package in ("torch", "megatron", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise EnvironmentMismatchError(
                f'{package} is not installed; pip install ".[runtime]" in a clone'
            )
    # A process of its own, so that no GPU and no state of Megatron's is left here.
    with output.progress(f"{arguments.action}ing weights"):
        done = subprocess.run(
            [sys.executable, "-m", "megatron_hetero.lab.huggingface.job", *words],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        # A refusal is one line of ours; anything else is shown as it came.
        errors = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
        sys.stderr.write("\n".join(errors) + "\n" if errors else done.stderr)
        return done.returncode
    if arguments.json:
        output.json({"written": str(target), "count": int(done.stdout.split()[-1])})
    elif arguments.action == "import":
        output.show(f"Written to {target}. Train from it: --load {target} --finetune")
    else:
        output.show(f"Written to {target}: safetensors and config.json")
    return 0
