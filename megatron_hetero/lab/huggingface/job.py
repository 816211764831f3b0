"""A process in which Megatron builds the model and copies weights in or out.

    python -m megatron_hetero.lab.huggingface.job import HF_FOLDER CHECKPOINT
    python -m megatron_hetero.lab.huggingface.job export CHECKPOINT HF_FOLDER CONFIG.JSON

It runs on the CPU, in the precision of `config.json`. The model is in host memory once; there are
no gradients and no optimizer. `megatron-hetero ckpt` starts it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.errors import CheckpointError, HeteroError
from megatron_hetero.files import read_json
from megatron_hetero.lab.huggingface.families import MappedParameter, pieces_of
from megatron_hetero.lab.huggingface.folder import WeightFolder, write_folder
from megatron_hetero.lab.huggingface.trained_model import check_same_model
from megatron_hetero.model.load import load_workload
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.stock import StockJob
from megatron_hetero.runtime.job.world import World

WithModel = Callable[[list[Any]], None]


class _DoneError(SystemExit):
    """Exit from Megatron's `pretrain` once the model is built and has been used.

    The job takes it for a good end, at which a save that failed becomes an error.
    """


def import_weights(source: Path, checkpoint: Path) -> int:
    """Write a Megatron checkpoint (`torch_dist`, a release) with the weights of `source`.

    Returns:
        The number of parameters written.
    Raises:
        HeteroError: the family cannot be converted, a tensor is missing or of another shape, or
            the checkpoint cannot be written.
    """
    config_path = source / "config.json"
    pieces = _pieces_of(config_path)
    weights = WeightFolder(source)

    def fill_and_save(model: list[Any]) -> None:
        from megatron.training.training import save_checkpoint

        from megatron_hetero.runtime.megatron import checkpoint_metadata
        from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server

        save_without_a_server()
        _fill(_parameters(model), pieces, weights)
        _name_as_transformer_engine(model)
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
    pieces = _pieces_of(config_path)
    written: list[int] = []

    def load_and_write(model: list[Any]) -> None:
        from megatron.training import get_args
        from megatron.training.training import load_checkpoint

        from megatron_hetero.runtime.state.choosing import has_checkpoint, sound_step

        # The newest or none: an older one in its place would be taken for the newest.
        args = get_args()
        if has_checkpoint(args.load):
            sound_step(Path(args.load), None, may_fall_back=False)
            check_same_model(args)
        load_checkpoint(model, None, None, strict=True)
        tensors = _their_tensors(_parameters(model), pieces)
        written.append(write_folder(target, tensors, config_path))

    # `--finetune` takes the weights of any iteration and starts at step 0.
    flags = [f"--load={checkpoint}", "--finetune", "--exit-on-missing-checkpoint"]
    _with_model(config_path, flags, load_and_write)
    return written[0]


_BATCH = ("--micro-batch-size=1", "--global-batch-size=1")


def _pieces_of(config_path: Path) -> tuple[MappedParameter, ...]:
    # The reader of configurations says in words what is missing or misspelt.
    load_workload(config_path, [*_BATCH, "--seq-length=1"])
    return pieces_of(read_json(config_path).data)


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
    described = load_workload(config_path, [*_BATCH, f"--seq-length={length}"]).megatron_args
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
        # Megatron makes some weights in fp32 (norms), and turns all into one precision later.
        act([chunk.to(args.params_dtype) for chunk in model])
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


def _name_as_transformer_engine(model: list[Any]) -> None:
    """Give norms before experts the names of a job's layers, Megatron's default.

    The local layers of this process have another name for it, which stock Megatron finds nowhere.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_hetero.runtime.state.other_layers import NORM

    for layer in (module for chunk in model for module in chunk.modules()):
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer):
            names = layer.submodules_config.sharded_state_dict_keys_map
            layer.submodules_config = replace(
                layer.submodules_config,
                sharded_state_dict_keys_map={k: v for k, v in names.items() if k != NORM},
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
    _check_tied_head(pieces, weights)
    # Tied heads and buffers are stored by some versions although the model does not need them.
    left = [n for n in weights.never_read() if not n.endswith(_NOT_PARAMETERS)]
    if left:
        raise CheckpointError(
            f"the folder has tensors that the model of config.json has no place for: "
            f"{', '.join(left[:5])}{' and more' if len(left) > 5 else ''}"
        )


def _check_tied_head(pieces: Sequence[MappedParameter], weights: WeightFolder) -> None:
    """Refuse an output layer of its own where `config.json` says that it is the embedding."""
    if any(piece.megatron == "output_layer.weight" for piece in pieces):
        return
    (embedding,) = next(p.names for p in pieces if p.megatron.endswith("word_embeddings.weight"))
    for head in _HEADS:
        if head in weights and not torch.equal(weights(head), weights(embedding)):
            raise CheckpointError(
                f"{head} and {embedding} differ, but config.json ties them (tie_word_embeddings, "
                'which may be its family\'s default). Write "tie_word_embeddings": false into it '
                "to train both"
            )


_HEADS = ("lm_head.weight", "embed_out.weight")
_NOT_PARAMETERS = (
    *_HEADS,
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
    """Run one conversion; a refusal is the last line of stdout, as JSON, with its exit code."""
    action, *paths = argv
    try:
        if action == "import":
            print(import_weights(*map(Path, paths)))
        else:
            print(export_weights(*map(Path, paths)))
    except HeteroError as error:
        refusal = {"kind": type(error).__name__, "message": str(error)}
        print(json.dumps(refusal), end="", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
