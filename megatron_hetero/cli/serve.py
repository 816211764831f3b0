"""`megatron-hetero serve`: a replica that no engine runs, served by the runtime on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.cluster.inventory.discovery import find_gpus
from megatron_hetero.cluster.names import device_place
from megatron_hetero.errors import (
    CheckpointError,
    EnvironmentMismatchError,
    FileFormatError,
    UsageError,
)
from megatron_hetero.files import read_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.serving.fleet.file import load_serving_plan
from megatron_hetero.serving.fleet.plan import PlannedReplica

DESCRIPTION = """\
Serve one replica on this machine, whose stages may have unlike widths, and whose
GPUs unlike shares: layouts that neither vLLM nor SGLang runs.  Correctness comes
first here; what an engine runs, an engine serves faster.

  megatron-hetero serve --model HF_FOLDER --layout "tp2:20,tp1:12"
  megatron-hetero serve --model HF_FOLDER --plan serve.json --replica replica-0
  megatron-hetero serve --model FLAGS_FILE --load CHECKPOINT --layout "tp2(3:1):8"

It answers /v1/completions and /v1/chat/completions on the loopback interface,
greedy or seeded, whole or as a stream.  A folder's tokenizer is taken from the
folder; Megatron flags may follow after -- (another tokenizer, --bf16).  Needs
the extras runtime and serve."""
TAKES_MEGATRON_FLAGS = True
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `serve`."""
    parser.add_argument(
        "--model", type=Path, required=True, metavar="MODEL",
        help="a folder with a Hugging Face config.json, or a file of Megatron flags",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=Path, metavar="CHECKPOINT",
        help="a Megatron checkpoint (torch_dist); without it, the weights of the model's folder",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--layout", help='the stages, e.g. "tp2:20,tp1:12"')
    which.add_argument("--plan", type=Path, metavar="SERVE.JSON", help="take them from a plan")
    parser.add_argument("--replica", metavar="NAME", help="with --plan: which replica")
    parser.add_argument("--name", help="of the model, in answers (default: the model's file name)")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8100, help="to listen on (default: 8100)")
    parser.add_argument(
        "--kv-tokens", type=int, metavar="N",
        help="tokens whose keys and values are held (default: the plan's, or 16384)",
    )  # fmt: skip
    parser.add_argument(
        "--max-sequences", type=int, metavar="N",
        help="that run at once (default: the plan's, or 64)",
    )  # fmt: skip
    parser.add_argument(
        "--step-tokens", type=int, default=512, metavar="N",
        help="most tokens of a step; longer prompts come in chunks (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--answer-limit", type=float, default=60.0, metavar="SECONDS",
        help="a rank that answers no step for so long is given up (default: 60)",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the ranks' logs there")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Serve until stopped."""
    if not 1 <= arguments.port <= 65535:
        raise UsageError(f"--port {arguments.port} is not between 1 and 65535")
    if not 1 <= arguments.answer_limit <= 86400:
        raise UsageError(
            f"--answer-limit {arguments.answer_limit:g}: give 1 to 86400 seconds; ranks without "
            "work hear from the first one every half second"
        )
    # Cheap refusals come before torch is looked for.
    replica = _replica(arguments)
    for package, extra in (("torch", "runtime"), ("megatron", "runtime"), ("aiohttp", "serve")):
        if importlib.util.find_spec(package) is None:
            raise EnvironmentMismatchError(
                f'{package} is not installed; pip install ".[{extra}]" in a clone'
            )
    layout = arguments.layout
    kv_tokens, sequences = arguments.kv_tokens, arguments.max_sequences
    # The plan's replica; the user's own numbers win over the plan's.
    if replica is not None:
        layout = ",".join(f"tp{len(s.devices)}:{s.num_layers}" for s in replica.stages)
        kv_tokens = replica.kv_tokens if kv_tokens is None else kv_tokens
        sequences = replica.max_sequences if sequences is None else sequences
        _take_gpus(replica)
    # A folder's config.json has the length; a file of flags has its own.
    length = () if _has_length(arguments) else _length_of(arguments.model)
    job = ["--micro-batch-size=1", "--global-batch-size=1", *length, *_tokenizer_of(arguments)]
    described = load_workload(
        arguments.model, [*job, *arguments.megatron_args], is_planned=False
    ).megatron_args
    with ExitStack() as stack:
        # Without a checkpoint the folder's weights become one, for as long as the service runs.
        checkpoint = arguments.load
        if checkpoint is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron-hetero-"))
            checkpoint = _imported(arguments.model, Path(folder) / "checkpoint", output)
        from megatron_hetero.lab.serve.command import serve_here
        from megatron_hetero.lab.serve.rank import ServeOptions

        options = ServeOptions(
            arguments.host,
            arguments.port,
            arguments.name or arguments.model.resolve().name,
            ServeOptions.kv_tokens if kv_tokens is None else kv_tokens,
            ServeOptions.max_sequences if sequences is None else sequences,
            arguments.step_tokens,
            arguments.answer_limit,
            _ends_of(arguments.model),
        )
        serve_here(layout, (*described, f"--load={checkpoint}"), options, arguments.keep)
    return 0


def _replica(arguments: argparse.Namespace) -> PlannedReplica | None:
    """Return the replica of the plan; None where the layout is given.

    Raises:
        UsageError: it is not in the plan, or serves a part of requests alone.
    """
    if arguments.plan is None:
        if arguments.replica is not None:
            raise UsageError("--replica goes with --plan")
        return None
    plan = load_serving_plan(arguments.plan)
    names = [replica.name for replica in plan.replicas]
    if arguments.replica not in names:
        raise UsageError(f"--replica: name one of {', '.join(names)}")
    replica = plan.replicas[names.index(arguments.replica)]
    # A part of requests needs keys and values of another replica.
    if replica.phase != "both":
        raise UsageError(
            f"{replica.name} serves the {replica.phase} phase alone, which needs an engine that "
            "moves keys and values; serve a replica of the phase both"
        )
    return replica


def _take_gpus(replica: PlannedReplica) -> None:
    """Let this process and its ranks see the replica's GPUs alone, in the order of its stages.

    Without NVIDIA's driver the ranks compute on the CPU.

    Raises:
        UsageError: the replica lies on several machines.
        EnvironmentMismatchError: this machine does not have its GPUs.
    """
    hosts = sorted({stage.host for stage in replica.stages})
    if len(hosts) > 1:
        raise UsageError(
            f"{replica.name} lies on {', '.join(hosts)}, and this command starts ranks on one "
            "machine; start them by `torchrun -m megatron_hetero.lab.serve.rank` on each, or try "
            "the layout here with --layout"
        )
    if shutil.which("nvidia-smi") is None:
        return
    places = [device_place(device)[1] for stage in replica.stages for device in stage.devices]
    count = len(find_gpus())
    if max(places) >= count:
        raise EnvironmentMismatchError(
            f"{replica.name} has GPU {max(places)} of {hosts[0]}, and this machine has {count} "
            f"GPUs, numbered from 0; run it on {hosts[0]}, or try the layout here with --layout"
        )
    # Places in the plan are places on the bus.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, places))


def _has_length(arguments: argparse.Namespace) -> bool:
    return "--seq-length" in _named(arguments) or arguments.model.is_file()


def _named(arguments: argparse.Namespace) -> list[str]:
    """Return the names of Megatron's flags behind the `--`."""
    return [word.partition("=")[0] for word in arguments.megatron_args]


def _tokenizer_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the tokenizer of a Hugging Face folder as flags; none where the user names another.

    Raises:
        UsageError: the folder has no tokenizer, and none is named.
    """
    folder: Path = arguments.model
    if not folder.is_dir() or "--tokenizer-type" in _named(arguments):
        return ()
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(
            f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): copy the model's there, "
            "or name one behind the flags: -- --tokenizer-type HuggingFaceTokenizer "
            "--tokenizer-model FOLDER, or -- --tokenizer-type NullTokenizer, with which prompts "
            "and answers are numbers"
        )
    return "--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={folder}"


def _length_of(folder: Path) -> tuple[str, ...]:
    """Return the length of a Hugging Face model as a flag."""
    config = read_json(folder / "config.json").data
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return (f"--seq-length={length}",) if length else ()


def _ends_of(model: Path) -> str:
    """Return the tokens that end an answer, as `transformers` reads them from a folder: chats end
    with others than the tokenizer's (Llama 3 has three).

    Raises:
        FileFormatError: they are no numbers.
    """
    # A file of generation wins over the model's own configuration.
    for path in (model / "generation_config.json", model / "config.json"):
        if not path.is_file():
            continue
        file = read_json(path)
        found = file.data.get("eos_token_id") if isinstance(file.data, dict) else None
        ends = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token) is int and token >= 0 for token in ends):
            raise FileFormatError(
                f"{path}: eos_token_id is {str(found)[:60]}; it is a token's number, or a list"
            )
        if ends:
            return ",".join(map(str, ends))
    return ""


def _imported(folder: Path, checkpoint: Path, output: Output) -> Path:
    """Convert the weights of a Hugging Face folder, in a process of its own.

    Raises:
        UsageError: the model is no folder, and no checkpoint is given.
        CheckpointError: they cannot be converted.
    """
    if not (folder / "config.json").is_file():
        raise UsageError("--load: name the checkpoint; --model is no folder with weights")
    with output.progress("importing weights"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "megatron_hetero"),
                *("ckpt", "import", str(folder), str(checkpoint)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise CheckpointError(f"{folder}: {done.stderr.strip().removeprefix('error: ')}")
    return checkpoint
