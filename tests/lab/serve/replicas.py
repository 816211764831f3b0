"""Tiny models for tests of serving: a checkpoint of stock Megatron, one process as the reference,
and replicas on layouts."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.lab.serve.batch import Sampling, Step
from megatron_hetero.lab.serve.engine import RequestEvent, ServingEngine
from megatron_hetero.lab.serve.rank import ServeOptions, serve_rank
from megatron_hetero.lab.serve.sampling import draw_token
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs

VOCAB, LENGTH = 61, 48
COMMON = (
    "--hidden-size=32",
    f"--seq-length={LENGTH}",
    f"--max-position-embeddings={LENGTH}",
    "--tokenizer-type=NullTokenizer",
    f"--vocab-size={VOCAB}",
    "--make-vocab-size-divisible-by=4",
    "--normalization=RMSNorm",
    "--disable-bias-linear",
    "--init-method-std=0.3",
)
ROPE = ("--position-embedding-type=rope", "--swiglu")
MODELS: Mapping[str, tuple[str, ...]] = {
    "gqa": (*COMMON, *ROPE, "--num-layers=4", "--num-attention-heads=8", "--ffn-hidden-size=48",
            "--group-query-attention", "--num-query-groups=4",
            "--untie-embeddings-and-output-weights"),
    "learned": (*COMMON, "--num-layers=4", "--num-attention-heads=4", "--ffn-hidden-size=64"),
    "experts": (*COMMON, *ROPE, "--num-layers=4", "--num-attention-heads=4",
                "--ffn-hidden-size=48", "--num-experts=4", "--moe-router-topk=2",
                "--moe-ffn-hidden-size=48", "--sequence-parallel",
                "--moe-token-dispatcher-type=alltoall"),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request of a test."""

    prompt: tuple[int, ...]
    max_new: int
    sampling: Sampling


def requests(num: int = 6, seed: int = 3) -> list[Asked]:
    """Return requests of unlike lengths, every other one greedy."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(num):
        length = int(torch.randint(1, 20, (), generator=generator))
        prompt = torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()
        how = Sampling(0.0) if i % 2 else Sampling(0.9, 0.95, 20 if i % 4 else 0, seed=100 + i)
        found.append(Asked(tuple(prompt), 5 + i, how))
    return found


def make_checkpoint(model: str, folder: Path) -> Path:
    """Write a checkpoint of one process of stock Megatron, and its reference (`reference`)."""
    run_jobs([LocalJob("one process", 1, lambda rank: _reference(model, folder), folder)], 240)
    return folder / "checkpoint"


def _reference(model: str, folder: Path) -> None:
    """Save random weights, and answer `requests` by whole forward passes, without any cache."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hetero.runtime import backend
    from megatron_hetero.runtime.job.stock import StockJob
    from megatron_hetero.runtime.job.world import World
    from megatron_hetero.runtime.megatron import checkpoint_metadata
    from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
    from megatron_hetero.runtime.model import gpt

    class DoneError(Exception):
        pass

    backend.activate_cpu_backend()
    argv = [
        *(f for f in MODELS[model] if f != "--sequence-parallel"),
        *("--micro-batch-size=1", "--global-batch-size=1", "--train-iters=1", "--lr=1e-4"),
        *("--mock-data", "--eval-interval=1000", "--ckpt-format=torch_dist", "--no-save-optim"),
        *("--no-save-rng", f"--save={folder / 'checkpoint'}", "--save-interval=1"),
        *("--attention-dropout=0", "--hidden-dropout=0"),
        *backend.CPU_FLAGS,
    ]

    def hook(chunks: list[Any]) -> list[Any]:
        from megatron.training.training import save_checkpoint

        save_without_a_server()
        checkpoint_metadata.apply()
        save_checkpoint(0, chunks, None, None, 0, release=True)
        (chunk,) = chunks
        chunk.eval()
        (folder / "reference.json").write_text(json.dumps(_answers(chunk)))
        chunk.double()
        (folder / "reference-double.json").write_text(json.dumps(_answers(chunk)))
        raise DoneError

    world = World.from_environment()
    job = StockJob(argv, World(0, 1, world.store_path))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(DoneError):
        args = job.parse(parse_and_validate_args)
        config = job.configure(gpt_config_from_args, args)
        config.pre_wrap_hooks.append(hook)
        job.pretrain(
            pretrain,
            pretrain_cfg_container_from_args(args, config),
            gpt.datasets_provider,
            ModelType.encoder_or_decoder,
            gpt.forward_step,
        )


def _answers(chunk: Any) -> list[dict[str, Any]]:
    """Answer `requests` by whole forward passes."""
    told = []
    for asked in requests():
        tokens, logits = list(asked.prompt), []
        for number in range(asked.max_new):
            mask = torch.ones(len(tokens), len(tokens)).triu(1).bool()[None, None]
            with torch.no_grad():
                row = chunk(
                    torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0), mask
                )[0, -1, :VOCAB].double()
            logits.append(row.tolist())
            tokens.append(draw_token(row, asked.sampling, number).token)
        told.append({"tokens": tokens[len(asked.prompt) :], "logits": logits})
    return told


def reference(folder: Path, in_double: bool = False) -> list[dict[str, Any]]:
    """Return what one process has answered: for each request its tokens, and their logits."""
    name = "reference-double.json" if in_double else "reference.json"
    told: list[dict[str, Any]] = json.loads((folder / name).read_text())
    return told


@contextlib.contextmanager
def _computing_in_double() -> Iterator[None]:
    """Turn the loaded model, and what crosses between stages, to double precision, which no flag of
    Megatron's does."""
    from megatron_hetero.lab.serve import rank

    load, set_step = rank._loaded, rank.set_served_step

    def loaded(*given: Any) -> list[Any]:
        return [chunk.double() for chunk in load(*given)]

    def set_served_step(config: Any, step: Any) -> None:
        config.pipeline_dtype = torch.float64
        set_step(config, step)

    rank._loaded, rank.set_served_step = loaded, set_served_step  # type: ignore[assignment]
    try:
        yield
    finally:
        rank._loaded, rank.set_served_step = load, set_step


def argv_of(model: str, layout: str, checkpoint: Path, *more: str) -> tuple[str, ...]:
    """Return the flags of a replica."""
    return (
        *MODELS[model], f"--hetero-layout={layout} @1", f"--load={checkpoint}", *more
    )  # fmt: skip


def run_replica(
    argv: Sequence[str],
    num_ranks: int,
    folder: Path,
    options: ServeOptions | None = None,
    front: Callable[..., Any] | None = None,
    asked: Sequence[Asked] | None = None,
    in_double: bool = False,
) -> list[dict[str, Any]]:
    """Answer requests on a replica; return tokens and logits of each, and how it ended."""
    wanted = list(asked if asked is not None else requests())
    rows: dict[int, list[list[float]]] = {}

    def observe(step: Step, logits: torch.Tensor) -> None:
        for segment, row in zip(step.drawn, logits.double().tolist(), strict=True):
            rows.setdefault(segment.sequence, []).append(row)
        (folder / "logits.json").write_text(json.dumps(rows))

    answers: list[dict[str, Any]] = [{"tokens": [], "ended": None} for _ in wanted]

    def feed(engine: ServingEngine, tokenizer: Any, options: ServeOptions) -> Callable[[], None]:
        left = len(wanted)

        def listen(index: int) -> Callable[[RequestEvent], None]:
            def on_event(event: RequestEvent) -> None:
                nonlocal left
                if event.drawn is not None:
                    answers[index]["tokens"].append(event.drawn.token)
                if event.ended or event.error:
                    answers[index]["ended"] = event.ended or event.error
                    left -= 1
                    if not left:
                        engine.stop()

            return on_event

        for index, one in enumerate(wanted):
            engine.submit(one.prompt, one.max_new, one.sampling, frozenset(), listen(index))
        return lambda: None

    def rank(number: int) -> None:
        with _computing_in_double() if in_double else contextlib.nullcontext():
            serve_rank(argv, options or ServeOptions(), front or feed, observe)
        if number == 0:
            (folder / "answers.json").write_text(json.dumps(answers))

    run_jobs([LocalJob("replica", num_ranks, rank, folder)], 240)
    found: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    logits = json.loads((folder / "logits.json").read_text())
    return [{**answer, "logits": logits[str(i)]} for i, answer in enumerate(found)]
