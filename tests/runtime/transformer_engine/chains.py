"""Chains of three trainings, each going on from the checkpoint of the one before it.

The first has one kind of layers, the second the other, the third the first again. Each runs in a
process that has its layers (`with_layers`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

SAVED, LAST = 2, 4
"""Steps of the first training's checkpoint, and of the last training's."""


@dataclass(frozen=True)
class Chain:
    """Layouts of the trainings with the first kind of layers, and of the one between them."""

    name: str
    layers: str
    layout: str
    between: str
    flags: tuple[str, ...] = ()
    between_flags: tuple[str, ...] = ()
    common_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """One training of a chain.

    `source` is the folder of the checkpoint to load; the first has none and begins from a seed.
    """

    chain: Chain
    name: str
    layout: str
    flags: tuple[str, ...]
    source: str | None
    last_step: int


def parts(chain: Chain) -> dict[str, Part]:
    """first -> between -> back, and `straight`, which goes on from the first without it."""
    given = {
        "first": (chain.layout, chain.flags, None, SAVED),
        "between": (chain.between, chain.between_flags, "first", SAVED),
        "back": (chain.layout, chain.flags, "between", LAST),
        "straight": (chain.layout, chain.flags, "first", LAST),
    }
    return {name: Part(chain, name, *values) for name, values in given.items()}


def data_of(part: Part) -> dict[str, Any]:
    return asdict(part)


def train_all(folder: str, given: list[dict[str, Any]]) -> int:
    """Train some parts, one after another, in a process that has their layers."""
    for data in given:
        chain = Chain(**{k: _tuples(v) for k, v in data["chain"].items()})
        rest = {k: _tuples(v) for k, v in data.items() if k != "chain"}
        _train(Path(folder), Part(chain, **rest))
    return len(given)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _train(root: Path, part: Part) -> None:
    from megatron_hetero.lab.verify.options import Options
    from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
    from megatron_hetero.lab.verify.small.shrink import shrink
    from megatron_hetero.runtime.job import entry
    from megatron_hetero.runtime.job.local.jobs import LocalJob
    from megatron_hetero.runtime.job.local.launch import run_jobs
    from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
    from tests.runtime.workloads import LLAMA_LIKE, plan, workload

    folder = root / part.chain.name.replace(" ", "-")
    changes = dict(LLAMA_LIKE, per_token_loss=True, tied_embeddings=True)
    common = shrink(plan("tp2:3,tp1:1 @4 | tp1:4 @2"), workload(**changes))
    jobs = VerifyJobs(replace(common, plan=plan(part.layout)), Options(steps=SAVED), folder)
    if part.source is None:
        run_jobs([jobs.seed_job()], 200)
    argv = [a for a in jobs.training_arguments("adam") if not a.startswith("--train-iters")]
    if part.source is not None:
        start = ("--load", "--finetune", "--no-load-opt")
        argv = [a for a in argv if not a.startswith(start)]
        argv += [f"--load={folder / part.source / 'saved'}", "--override-opt-param-scheduler"]
    multiple = common.vocab_multiple // lcm(*plan(part.layout).layout.tensor_parallel_widths)
    own = folder / part.name
    argv += [
        *part.flags,
        *part.chain.common_flags,
        f"--train-iters={part.last_step}",
        f"--make-vocab-size-divisible-by={multiple}",
        f"--save={own / 'saved'}",
        "--save-interval=1000",
        f"--hetero-layout={part.layout}",
        f"--data-cache-path={own / 'cache'}",
    ]

    def run(rank: int) -> None:
        save_without_a_server()
        entry.main(argv)

    run_jobs([LocalJob(part.name, plan(part.layout).layout.num_devices, run, own)], 200)
