"""`megatron-hetero probe` behind the command line: one launch for each tensor-parallel width.

Every launch is a set of fresh processes on this machine that meet through a file (neither CUDA nor
Megatron's global state survives a fork or a second model). profile.json is written after each
launch, so that an interrupted probe continues where it was.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_hetero import __version__
from megatron_hetero.cost.work.profile import (
    PIECES,
    PROFILE_SCHEMA_VERSION,
    MeasuredType,
    load_profile,
)
from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError, UsageError
from megatron_hetero.files import read_json, write_json
from megatron_hetero.lab.probe.cards import ProbedCard, only
from megatron_hetero.lab.probe.processes import run_ranks
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.recompute import modules_if_selective
from megatron_hetero.model.spec import Workload

RANK_MODULE = "megatron_hetero.lab.probe.rank"

_NOT_FOR_A_PROBE = (
    "--save", "--load", "--pretrained-checkpoint", "--data-path", "--train-data-path",
    "--valid-data-path", "--test-data-path", "--data-args-path", "--per-split-data-args-path",
    "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--tensorboard-dir",
    "--wandb-project", "--wandb-exp-name", "--train-samples", "--lr-decay-samples",
    "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-decay-iters", "--lr-warmup-iters",
    "--rampup-batch-size", "--use-distributed-optimizer", "--overlap-grad-reduce",
    "--overlap-param-gather", "--num-layers", "--global-batch-size", "--micro-batch-size",
    "--train-iters", "--eval-iters", "--eval-interval", "--mock-data", "--vocab-size", "--lr",
    "--min-lr", "--exit-on-missing-checkpoint", "--recompute-num-layers",
)  # fmt: skip
"""Flags of a job that read or write files, or that the probe sets by itself."""


@dataclass(frozen=True)
class ProbeRequest:
    """Pieces to measure, and the file of the results.

    Plans look the times up under the name `gpu`. `num_busy` GPUs compute at the same time, as in
    training, where they share power, memory and cooling. `cards` are those of this type, none on a
    CPU. `limit_s`: seconds after which the processes of one width have failed.
    """

    workload: Workload
    gpu: str
    widths: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    num_layers: int
    seconds: float
    output: Path
    num_busy: int = 1
    cards: tuple[ProbedCard, ...] = ()
    limit_s: float = 900.0

    def num_ranks(self, width: int) -> int:
        """Return the processes for one width: whole groups within `num_busy`, at least one."""
        return width * max(1, self.num_busy // width)


@dataclass(frozen=True)
class MeasuredWidth:
    """Result file of one width; None if the output had all points already."""

    width: int
    result: dict[str, Any] | None


def probe(request: ProbeRequest, on_progress: Callable[[str], None]) -> tuple[MeasuredWidth, ...]:
    """Measure every width missing from the file, and add the result.

    Raises:
        UnsupportedError: the model's layers are of unlike kinds.
        UsageError: the file was measured with other software, or on another GPU of this name.
        EnvironmentMismatchError: this machine has fewer GPUs than the widest width.
        CheckFailedError: a process failed or did not end; the message has the end of its log.
        ProfileError: the file is no profile.
    """
    if request.workload.model.kinds:
        raise UnsupportedError(
            "--moe-layer-freq: a profile has the time of one kind of layer, and this model has "
            "two. Plan without --profile, or probe a model with experts in every layer."
        )
    # What the file has already is not measured again.
    _check_gpus(request)
    data = _existing(request)
    measured = []
    for number, width in enumerate(request.widths, start=1):
        # A size without one of its pieces is measured whole.
        missing = [s for s in request.micro_batch_sizes if not _has(data, request, width, s)]
        if not missing:
            measured.append(MeasuredWidth(width, None))
            continue
        on_progress(f"width {width} ({number} of {len(request.widths)}): micro-batches "
                    f"{', '.join(map(str, missing))}")  # fmt: skip
        # Written after each width, so that an interruption loses one width only.
        result = _launch(request, width, tuple(missing))
        _add(data, request, width, result)
        write_json(request.output, data)
        # Read back: a file that `plan` could not load has to fail now.
        load_profile(request.output)
        measured.append(MeasuredWidth(width, result))
    return tuple(measured)


def _check_gpus(request: ProbeRequest) -> None:
    count = len(request.cards)
    if not count:
        return
    if count < max(request.widths):
        raise EnvironmentMismatchError(
            f"width {max(request.widths)} needs as many {request.gpu} on this machine; it has "
            f"{count}. Give smaller --widths."
        )
    if count < request.num_busy:
        raise EnvironmentMismatchError(
            f"--gpus {request.num_busy}: this machine has {count} {request.gpu}"
        )


def _existing(request: ProbeRequest) -> dict[str, Any]:
    """Read the output file, or start a new one."""
    # Versions by GPU type, because one file may hold several types.
    provenance = {
        "tool": f"megatron-hetero {__version__}",
        f"{request.gpu}: torch": importlib.metadata.version("torch"),
        f"{request.gpu}: megatron-core": importlib.metadata.version("megatron-core"),
        f"{request.gpu}: machine": platform.node(),
        f"{request.gpu}: busy GPUs": str(request.num_busy),
    }
    if not request.output.exists():
        return {"version": PROFILE_SCHEMA_VERSION, "provenance": provenance, "points": []}
    load_profile(request.output)
    # Another machine or load of the same type is recorded and does no harm.
    may_differ = {f"{request.gpu}: machine", f"{request.gpu}: busy GPUs"}
    data: dict[str, Any] = read_json(request.output).data
    for key, value in provenance.items():
        known = data["provenance"].get(key)
        if known is not None and known != value and key not in may_differ:
            raise UsageError(
                f"{request.output} was measured with {key} {known}, and here it is {value}; times "
                "of both in one file would not go together. Write to another file."
            )
    data["provenance"] = {**data["provenance"], **provenance}
    return data


def _key(request: ProbeRequest, width: int, size: int, piece: str) -> dict[str, Any]:
    """Return the identifying fields of a measured point."""
    model, training = request.workload.model, request.workload.training
    modules = list(modules_if_selective(training))
    # Fields of a dense model's key do not change when the schema learns of further fields.
    only_if_used = (
        "num_experts", "moe_router_topk", "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
        "qk_pos_emb_head_dim", "v_head_dim",
    )  # fmt: skip
    return {
        "gpu": request.gpu,
        "precision": training.precision,
        "tensor_parallel": width,
        "micro_batch_size": size,
        "piece": piece,
        "recompute": training.recompute,
        **({"recompute_modules": modules} if modules else {}),
        # Megatron switches it off at width 1, and the planner asks with the job's own word.
        "sequence_parallel": training.sequence_parallel,
        "shape": {
            "hidden_size": model.hidden_size,
            "ffn_hidden_size": model.ffn_hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_query_groups": model.num_query_groups,
            "seq_length": model.seq_length,
            "vocab_size": model.vocab_size,
            "gated_mlp": model.gated_mlp,
            **{name: size for name in only_if_used if (size := getattr(model, name))},
        },
    }


def _has(data: dict[str, Any], request: ProbeRequest, width: int, size: int) -> bool:
    # Two points measure the same piece if all fields but their seconds agree.
    known = [{k: v for k, v in p.items() if not k.endswith("_s")} for p in data["points"]]
    return all(_key(request, width, size, piece) in known for piece in PIECES)


def _add(data: dict[str, Any], request: ProbeRequest, width: int, result: dict[str, Any]) -> None:
    new = []
    for piece in result["pieces"]:
        key = _key(request, width, piece["micro_batch_size"], piece["piece"])
        new.append({**key, "forward_s": piece["forward_s"], "backward_s": piece["backward_s"]})
    # New seconds take the place of those that the file has for the same piece.
    keys = [{k: v for k, v in p.items() if not k.endswith("_s")} for p in new]
    kept = [
        p for p in data["points"]
        if {k: v for k, v in p.items() if not k.endswith("_s")} not in keys
    ]  # fmt: skip
    data["points"] = kept + new
    # Figures of the card itself, such as its launch time, which plans look up by type.
    asked = {name: result.get(name) for name in MeasuredType.model_fields}
    if figures := {name: value for name, value in asked.items() if value is not None}:
        gpus = data.setdefault("gpus", {})
        gpus[request.gpu] = gpus.get(request.gpu, {}) | figures
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    data["provenance"][f"{request.gpu}: measured"] = today


def megatron_flags(request: ProbeRequest, width: int) -> tuple[str, ...]:
    """Return the user's flags for a job of few layers and random data, at one width."""
    model, training = request.workload.model, request.workload.training
    # As in argparse the last occurrence of a flag holds.
    options = last_of_each(flag_table().split(request.workload.megatron_args))
    kept = [o for o in options if not set(o.flag.names) & set(_NOT_FOR_A_PROBE)]
    batch = max(request.micro_batch_sizes)
    copies = request.num_ranks(width) // width
    own = [
        f"--num-layers={request.num_layers}",
        f"--tensor-model-parallel-size={width}",
        f"--micro-batch-size={batch}",
        f"--global-batch-size={batch * copies}",
        "--train-iters=1",
        "--eval-iters=0",
        "--eval-interval=1000000",
        "--lr=1e-5",
        "--mock-data",
        "--tokenizer-type=NullTokenizer",
        f"--vocab-size={model.vocab_size}",
        "--num-workers=0",
        # `run_ranks` watches the ranks; a group that has measured leaves before the others.
        "--hetero-stall-limit=0",
    ]
    # Megatron refuses full recompute without a method and a number of layers.
    if training.recompute == "full":
        own.append("--recompute-num-layers=1")
        if not any("--recompute-method" in o.flag.names for o in kept):
            own.append("--recompute-method=uniform")
    return (*(token for option in kept for token in option.tokens), *own)


def _launch(request: ProbeRequest, width: int, sizes: Sequence[int]) -> dict[str, Any]:
    model = request.workload.model
    num_ranks = request.num_ranks(width)
    spec = {
        "megatron": list(megatron_flags(request, width)),
        "micro_batch_sizes": list(sizes),
        "seconds": request.seconds,
        "width": width,
        # Sizes of the matrix products whose rates are measured.
        "shapes": {
            "hidden": model.hidden_size,
            "ffn": model.ffn_hidden_size,
            "heads": model.num_attention_heads,
            "tokens": model.seq_length,
            "precision": request.workload.training.precision,
        },
    }
    # The folder holds the store through which the ranks meet, and their logs.
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-probe-") as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        files = [str(folder / "spec.json"), str(folder / "result.json")]
        run_ranks(RANK_MODULE, files, num_ranks, folder, only(request.cards), request.limit_s)
        result: dict[str, Any] = read_json(folder / "result.json").data
        return result


def summary(measured: Sequence[MeasuredWidth]) -> list[dict[str, Any]]:
    """Convert the result of each width for `--json`."""
    return [asdict(found) for found in measured]
