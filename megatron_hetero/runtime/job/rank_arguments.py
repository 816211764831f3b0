"""The argument vector that Megatron's parser sees on each rank, and settings followed after it.

Megatron's parser knows one tensor-parallel and one pipeline size for the whole job. So each rank
parses as if its replica, at its own stage's width, were the whole job (a *virtual* world of
`tp * cp * pp`): every derived number, above all the global batch, is then the whole job's. The real
world comes back with `torch.distributed`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.support.tensor_overlap import FLAG as TENSOR_OVERLAP
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.plan.ranks import Position, rank_table


def rank_arguments(plan: Plan, position: Position, megatron: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments for Megatron's parser on the rank at `position`."""
    replica = plan.replicas[position.replica]
    shape = replica.stages[position.stage].shape
    width = shape.tensor_parallel
    if width == 1:
        # Megatron switches sequence parallelism off there, and then refuses --tp-comm-overlap.
        megatron = [word for word in megatron if word != TENSOR_OVERLAP]
    argv = [
        *megatron,
        f"--tensor-model-parallel-size={width}",
        f"--context-parallel-size={shape.context_parallel}",
        f"--pipeline-model-parallel-size={len(replica.stages)}",
        f"--make-vocab-size-divisible-by={_vocab_multiple(plan, megatron) // width}",
        "--dataloader-type=external",
        # Extra gloo groups serve the distributed optimizer's checkpoints alone.
        "--disable-gloo-process-groups",
        # Megatron keeps random states in a (pipeline, tensor) grid, which cannot be ragged; ours
        # are `runtime.state.random_states`.
        "--no-save-rng",
        "--no-load-rng",
        # Megatron would count its instances among the ranks of this replica alone.
        "--num-distributed-optimizer-instances=1",
    ]
    if position != rank_table(plan)[-1]:
        # Megatron opens its writers on the last rank; so far each replica has one of its own.
        argv += ["--tensorboard-dir=", "--wandb-project="]
    if len(replica.stages) > 1:
        further = given_number(megatron, "--mtp-num-layers") or 0
        layout = pipeline_layout(plan, position, further)
        argv.append(f"--pipeline-model-parallel-layout={layout}")
    if given_number(megatron, "--eval-micro-batch-size") is not None:
        # Megatron's parser would divide validation by it; the plan does (`AsymmetricJob`).
        argv.append(f"--eval-micro-batch-size={replica.micro_batch_size}")
    if replica.micro_batch_size is not None:
        # Megatron counts samples as micro-batches times their size, which stays the job's.
        argv.append(f"--micro-batch-size={replica.micro_batch_size}")
    return tuple(argv)


def follow_stage(args: Any, stage: Stage) -> None:
    """Replace the job's settings by a stage's own in Megatron's parsed `args`."""
    # The stage has no setting of its own: the job's flags hold.
    if stage.recompute is None:
        return
    args.recompute_granularity = None if stage.recompute == "none" else stage.recompute
    args.recompute_method = args.recompute_num_layers = None
    if stage.recompute == "full":
        # Some of the stage's layers, or every layer by itself: Megatron's two methods.
        some = stage.recompute_num_layers is not None
        args.recompute_method = "block" if some else "uniform"
        args.recompute_num_layers = stage.recompute_num_layers if some else 1


def follow_job(args: Any, megatron: Sequence[str]) -> None:
    """Restore the settings changed by `rank_arguments` while Megatron opened its writers."""
    args.tensorboard_dir = _given_word(megatron, "--tensorboard-dir")
    args.wandb_project = _given_word(megatron, "--wandb-project") or ""


def _vocab_multiple(plan: Plan, megatron: Sequence[str]) -> int:
    """Return the multiple to which the vocabulary is padded, the same on all ranks.

    Megatron pads to `--make-vocab-size-divisible-by` times the width; here the lcm of all widths
    counts.
    """
    return vocab_divisor(megatron) * lcm(*plan.layout.tensor_parallel_widths)


def vocab_divisor(megatron: Sequence[str]) -> int:
    """Return `--make-vocab-size-divisible-by` as the user gave it, or Megatron's default."""
    given = given_number(megatron, "--make-vocab-size-divisible-by")
    return 128 if given is None else given


def job_micro_batch_size(plan: Plan, megatron: Sequence[str]) -> int:
    """Return the micro-batch size, in sequences, of replicas without a size of their own.

    Raises:
        UsageError: neither the flags nor the plan have it.
    """
    size = given_number(megatron, "--micro-batch-size")
    if size is None and plan.workload is not None:
        size = plan.workload.training.micro_batch_size
    if size is None:
        raise UsageError("--micro-batch-size is missing; Megatron needs it.")
    return size


def shuffles_data(megatron: Sequence[str]) -> bool:
    """Tell if the user asks for `--dataloader-type cyclic`; Megatron itself is told our own value.

    Raises:
        UnsupportedError: the script has data loaders of its own.
    """
    kind = _given_word(megatron, "--dataloader-type")
    if kind == "external":
        raise UnsupportedError(
            "--dataloader-type external: a plan deals each step's samples out to its replicas, so "
            "the loaders are its own. Use single or cyclic."
        )
    return kind == "cyclic"


def given_number(megatron: Sequence[str], flag: str) -> int | None:
    """Return a number among the user's flags; the last one counts, as in Megatron's parser."""
    word = _given_word(megatron, flag)
    return None if word is None else int(word)


def _given_word(megatron: Sequence[str], flag: str) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    return parser.parse_known_args(list(megatron))[0].value


def pipeline_layout(plan: Plan, position: Position, further_tokens: int = 0) -> str:
    """Return a replica's `--pipeline-model-parallel-layout` for the parser of a given rank.

    Layers that predict further tokens (`m`) are the last stage's.

    Megatron expects equally many chunks on all stages, and chunk i of stage s at place i * stages +
    s. A rank whose replica has unequal numbers writes its own chunks to such places, and other
    layers between them: only their sums matter.
    """
    replica = plan.replicas[position.replica]
    num_stages, s = len(replica.stages), position.stage
    # One chunk on each stage: every stage's layers stand at its own place.
    if not any(stage.chunks for stage in replica.stages):
        places = ["t" * stage.shape.num_layers for stage in replica.stages]
    else:
        chunks = stage_chunks(replica.stages[s])
        places = [""] * (num_stages * len(chunks))
        # `due`: first layer without a place yet; `at`: the place behind this rank's newest chunk.
        due = at = 0
        for i, chunk in enumerate(chunks):
            places[at] += "t" * (chunk.first_layer - due)
            places[i * num_stages + s] += "t" * chunk.num_layers
            due, at = chunk.first_layer + chunk.num_layers, i * num_stages + s + 1
        # Layers behind this rank's last chunk.
        places[-1] += "t" * (replica.shape.num_layers - due)
    return f"E{'|'.join(places)}{'m' * further_tokens}L"


@contextlib.contextmanager
def virtual_world(plan: Plan, position: Position, argv: Sequence[str]) -> Iterator[None]:
    """Let Megatron parse `argv` as in a job of this replica alone, at this stage's width."""
    replica = plan.replicas[position.replica]
    shape = replica.stages[position.stage].shape
    # Megatron's order of ranks: stage by stage, in a stage group by group, tensor ranks fastest.
    place = shape.tensor_parallel * position.context_rank + position.tensor_rank
    environment = {
        "WORLD_SIZE": str(shape.num_devices * len(replica.stages)),
        "RANK": str(shape.num_devices * position.stage + place),
    }
    saved_environment = {name: os.environ.get(name) for name in environment}
    saved_argv = sys.argv
    os.environ.update(environment)
    sys.argv = [saved_argv[0], *argv]
    try:
        yield
    finally:
        sys.argv = saved_argv
        for name, value in saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
