"""A process in which Megatron builds the model and copies weights in or out.

    python -m megatron_hetero.lab.huggingface.job import HF_FOLDER CHECKPOINT
    python -m megatron_hetero.lab.huggingface.job export CHECKPOINT HF_FOLDER CONFIG.JSON

It runs on the CPU, in the precision of `config.json`. The model is in host memory once; there are
no gradients and no optimizer. `megatron-hetero ckpt` starts it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.errors import CheckpointError, HeteroError
from megatron_hetero.files import read_json
from megatron_hetero.lab.huggingface.families import MappedParameter, pieces_of
from megatron_hetero.lab.huggingface.folder import WeightFolder, write_folder
from megatron_hetero.model.load import load_workload
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.stock import StockJob
from megatron_hetero.runtime.job.world import World

WithModel = Callable[[list[Any]], None]


class _DoneError(Exception):
    """Exit from Megatron's `pretrain` once the model is built and has been used."""


def import_weights(source: Path, checkpoint: Path) -> int:
    """Write a Megatron checkpoint (`torch_dist`, a release) with the weights of `source`.

    Returns:
        The number of parameters written.
    Raises:
        HeteroError: the family cannot be converted, or a tensor is missing or of another shape.
    """
    config_path = source / "config.json"
    pieces = pieces_of(read_json(config_path).data)
    weights = WeightFolder(source)

    def fill_and_save(model: list[Any]) -> None:
        from megatron.training.training import save_checkpoint

        from megatron_hetero.runtime.megatron import checkpoint_metadata
        from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server

        save_without_a_server()
        _fill(_parameters(model), pieces, weights)
        checkpoint_metadata.apply()
        save_checkpoint(0, model, None, None, 0, release=True)

    _with_model(config_path, [f"--save={checkpoint}", "--save-interval=1"], fill_and_save)
    return len(pieces)


def export_weights(checkpoint: Path, target: Path, config_path: Path) -> int:
    """Write the weights of a Megatron checkpoint as safetensors, beside a copy of `config_path`.

    Returns:
        The number of files.
    Raises:
        HeteroError: the family cannot be converted, or the checkpoint is another model's.
    """
    pieces = pieces_of(read_json(config_path).data)
    written: list[int] = []

    def load_and_write(model: list[Any]) -> None:
        from megatron.training.training import load_checkpoint

        load_checkpoint(model, None, None, strict=True)
        tensors = _their_tensors(_parameters(model), pieces)
        written.append(write_folder(target, tensors, config_path))

    # `--finetune` takes the weights of any iteration and starts at step 0.
    flags = [f"--load={checkpoint}", "--finetune", "--exit-on-missing-checkpoint"]
    _with_model(config_path, flags, load_and_write)
    return written[0]


def _with_model(config_path: Path, flags: Sequence[str], act: WithModel) -> None:
    """Build the model of `config_path` on this CPU by Megatron, and call `act` on it."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hetero.runtime.model import gpt

    backend.activate_cpu_backend()
    # Flags of a training job of this model, the smallest that Megatron accepts.
    config = read_json(config_path).data
    # GPT-2's config has the older name `n_positions`.
    length = config.get("max_position_embeddings") or config["n_positions"]
    batch = ["--micro-batch-size=1", "--global-batch-size=1", f"--seq-length={length}"]
    described = load_workload(config_path, batch).megatron_args
    argv = [
        *described,
        *("--train-iters=1", "--lr=1e-4", "--mock-data", "--tokenizer-type=NullTokenizer"),
        *("--make-vocab-size-divisible-by=1", "--eval-interval=1000", "--ckpt-format=torch_dist"),
        *("--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"),
        *flags,
        *backend.CPU_FLAGS,
    ]

    # Act on the built model, and leave before any training.
    def hook(model: list[Any]) -> list[Any]:
        act(model)
        raise _DoneError

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        # Nobody else takes part, so a file in a folder of our own serves for the rendezvous.
        job = StockJob(argv, World(0, 1, str(Path(folder) / "store")))
        args = job.parse(parse_and_validate_args)
        model = job.configure(gpt_config_from_args, args)
        model.pre_wrap_hooks.append(hook)
        with contextlib.suppress(_DoneError):
            job.pretrain(
                pretrain,
                pretrain_cfg_container_from_args(args, model),
                gpt.datasets_provider,
                ModelType.encoder_or_decoder,
                gpt.forward_step,
            )


def _parameters(model: list[Any]) -> dict[str, torch.Tensor]:
    return {name: p.data for chunk in model for name, p in chunk.named_parameters()}


def _fill(
    parameters: dict[str, torch.Tensor], pieces: Sequence[MappedParameter], weights: WeightFolder
) -> None:
    # Names must agree in full before the first copy: no model is filled in part.
    _check_complete(parameters, pieces)
    for piece in pieces:
        value = piece.join(*(weights(name) for name in piece.names))
        parameter = parameters[piece.megatron]
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"{' + '.join(piece.names)} give {list(value.shape)}; in the model of config.json "
                f"{piece.megatron} is {list(parameter.shape)}"
            )
        parameter.copy_(value)
    # Tied heads and buffers are stored by some versions although the model does not need them.
    left = [n for n in weights.never_read() if not n.endswith(_NOT_PARAMETERS)]
    if left:
        raise CheckpointError(
            f"the folder has tensors that the model of config.json has no place for: "
            f"{', '.join(left[:5])}{' and more' if len(left) > 5 else ''}"
        )


_NOT_PARAMETERS = (
    "lm_head.weight",
    "embed_out.weight",
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


def _their_tensors(
    parameters: dict[str, torch.Tensor], pieces: Sequence[MappedParameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    _check_complete(parameters, pieces)
    for piece in pieces:
        yield from zip(piece.names, piece.split(parameters[piece.megatron]), strict=True)


def _check_complete(parameters: dict[str, torch.Tensor], pieces: Sequence[MappedParameter]) -> None:
    named = {piece.megatron for piece in pieces}
    if named != set(parameters):
        raise CheckpointError(
            "Megatron's model and config.json disagree about the parameters: only in Megatron "
            f"{sorted(set(parameters) - named)[:5]}, only in the file "
            f"{sorted(named - set(parameters))[:5]}"
        )


def main(argv: Sequence[str]) -> int:
    """Run one conversion; errors go to stderr with their exit code."""
    action, *paths = argv
    try:
        if action == "import":
            print(import_weights(*map(Path, paths)))
        else:
            print(export_weights(*map(Path, paths)))
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
