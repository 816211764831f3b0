"""`megatron-hetero ckpt`: Hugging Face weights to Megatron checkpoints, and back."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_hetero.cli.arguments import check_new_folder
from megatron_hetero.cli.output import Output
from megatron_hetero.errors import EXIT_RANK_DIED, EnvironmentMismatchError, UsageError
from megatron_hetero.files import make_folder
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
    with _whole_folder(target) as passing:
        words[2] = str(passing)
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
            shutil.rmtree(passing)
    if done.returncode < 0:
        return output.failed(
            "RankFailedError",
            f"the process that converts was ended by signal {-done.returncode}; signal 9 is often "
            "the system's for want of memory, which has to hold the whole model",
            EXIT_RANK_DIED,
        )
    if done.returncode:
        # A refusal is the last line, as data; anything else is shown as it came.
        last = done.stdout.rpartition("\n")[2]
        if last.startswith("{"):
            refusal = json.loads(last)
            message = refusal["message"].replace(str(passing), str(target))
            return output.failed(refusal["kind"], message, done.returncode)
        sys.stderr.write(done.stderr)
        return done.returncode
    if arguments.json:
        output.json({"written": str(target), "count": int(done.stdout.split()[-1])})
    elif arguments.action == "import":
        output.show(f"Written to {target}. Train from it: --load {target} --finetune")
    else:
        output.show(f"Written to {target}: safetensors and config.json")
    return 0


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Yield a folder in `target` to write into: its files move up at the end, all or none.

    Raises:
        FileFormatError: one of the folders cannot be made.
    """
    is_new = not target.exists()
    make_folder(target)
    passing = target / f".unfinished-{os.getpid()}"
    make_folder(passing)
    try:
        yield passing
        if passing.is_dir():
            # Last what readers look for first: a checkpoint's tracker, a model's config.json.
            for path in sorted(passing.iterdir(), key=lambda p: (p.is_file(), p.name in _LAST)):
                path.rename(target / path.name)
    finally:
        shutil.rmtree(passing, ignore_errors=True)
        # A folder with something in it stays.
        if is_new:
            with suppress(OSError):
                target.rmdir()


_LAST = ("config.json", "latest_checkpointed_iteration.txt")
