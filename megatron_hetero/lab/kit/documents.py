"""Documents of unlike length, dealt to groups of ranks (`--hetero-sequences flexible`), beside one
process of stock Megatron that trains each document whole.

The deal is fixed, not searched, so that each step has all that a deal can: a document in parts of
unlike length whose members exchange heads, one whose keys all ranks gather, and a rank without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_hetero.lab.kit.small_job import Machine, on_this_backend
from megatron_hetero.lab.verify.distance.compare import compare, tolerances
from megatron_hetero.lab.verify.faults import catalogue
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.lab.verify.run import records
from megatron_hetero.model.load import load_workload
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.stock import StockJob
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.model import gpt
from megatron_hetero.runtime.model.initial_weights import initialise
from megatron_hetero.runtime.model.samples.provider import EveryRankProvider
from megatron_hetero.runtime.sequences import steps
from megatron_hetero.runtime.sequences.documents import document_datasets
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens

NUM_RANKS = 3
LIMIT_S = 120.0
_VOCABULARY = 101
_LENGTHS = (30, 41, 8, 64, 5, 13, 17, 25, 2, 77, 9, 6)
_BATCH, _STEPS = 6, 2
_FLAGS = (
    "--num-layers=2",
    "--hidden-size=64",
    "--num-attention-heads=4",
    "--seq-length=128",
    "--max-position-embeddings=128",
    "--tokenizer-type=NullTokenizer",
    f"--vocab-size={_VOCABULARY}",
    "--make-vocab-size-divisible-by=1",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    "--split=1,0,0",
    f"--global-batch-size={_BATCH}",
    f"--train-iters={_STEPS}",
    "--optimizer=adam",
    "--lr=3e-4",
    "--lr-decay-style=constant",
    "--eval-iters=0",
    "--eval-interval=1000000",
    "--log-interval=1",
    "--num-workers=0",
)
_CLUSTER = """\
version: 1
gpu_types:
  CARD: {memory: 24 GB, memory_bandwidth: 700 GB/s, bf16: 40 TFLOPS, fp16: 40 TFLOPS,
         fp32: 20 TFLOPS, compute_capability: "8.0"}
links:
  inside_node:
    CARD: {bandwidth: 25 GB/s, latency: 5 us}
  between_nodes:
    main: {bandwidth: 25 GB/s, latency: 10 us}
nodes:
  - {name: a, gpu: CARD, count: 2}
  - {name: b, gpu: CARD, count: 1}
"""
"""Two cards and one: groups of ranks (0, 1) and of all. No figure decides the fixed deal."""


def deal(tree: Any, documents: steps.Documents) -> steps.Dealt:
    """Deal six documents to three ranks, whatever their lengths."""
    lengths = [len(document["tokens"]) for document in documents]

    def parts(document: int, *weights: int) -> tuple[int, ...]:
        """Cut a document by weights; the last member has what is left."""
        first = [lengths[document] * w // sum(weights) for w in weights[:-1]]
        return (*first, lengths[document] - sum(first))

    return StepTokens(
        (
            # Two ranks exchange heads of two documents, the third has one to itself.
            (
                GroupTokens(0, (0, 1), (parts(0, 2, 1), parts(1, 1, 3)), 1.0, (2,)),
                GroupTokens(2, (2,), (parts(2, 1),), 1.0),
            ),
            # All gather the keys of one document, in unlike parts.
            (GroupTokens(0, (3,), (parts(3, 3, 1, 2),), 1.0),),
            # Rank 1 has none.
            (
                GroupTokens(0, (4,), (parts(4, 1),), 1.0),
                GroupTokens(2, (5,), (parts(5, 1),), 1.0),
            ),
        )
    ), ""


def try_documents(machine: Machine, folder: Path, fault: str | None = None) -> dict[str, Any]:
    """Train dealt documents, and one process beside them.

    Args:
        machine: the GPUs of the machine, or none.
        folder: for the files of the runs.
        fault: an error of `lab.verify.faults`, planted in the ranks.
    Returns:
        Distances and tolerances, as `lab.verify.outcome.outcome_to_data` has them.
    Raises:
        RankFailedError: a process refused the job, died, or did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = folder / "cluster.yaml"
    cluster.write_text(_CLUSTER, encoding="utf-8")
    flags = (*_FLAGS, f"--data-path={folder / 'text'}", *machine.flags_of(layers.LOCAL))

    # The plug-in's own entry, with the fixed deal in place of the search for a deal.
    def ranks(rank: int) -> None:
        if fault is not None:
            catalogue.plant(fault)
        steps.dealt_tokens = deal
        recorder = Recorder()
        argv = (*flags, "--hetero-sequences=flexible", f"--hetero-cluster={cluster}")
        entry.main((*argv, f"--data-cache-path={folder / 'ranks' / 'cache'}"), recorder)
        recorder.save(folder / "ranks" / f"record-{rank}")

    # Stock Megatron, a document in each micro-batch.
    def one(rank: int) -> None:
        recorder = Recorder()
        train_whole((*flags, f"--data-cache-path={folder / 'one' / 'cache'}"), recorder)
        recorder.save(folder / "one" / "record-0")

    def write(rank: int) -> None:
        write_documents(folder / "text", _LENGTHS, _VOCABULARY - 1)

    dealt = LocalJob("dealt documents", NUM_RANKS, on_this_backend(ranks), folder / "ranks")
    whole = LocalJob("whole documents", 1, on_this_backend(one), folder / "one")
    # The data set has to be whole before a run opens it.
    run_jobs([LocalJob("documents", 1, write, folder / "data")], LIMIT_S)
    run_jobs([dealt, whole], LIMIT_S)
    # Which rank read which document is the deal's, so samples are not compared.
    model = load_workload(None, (*flags, "--micro-batch-size=1")).model
    bounds = tolerances(model, "adam")
    (reference,) = records(whole)
    found = compare(reference, records(dealt), [], model, "adam")
    keys = ("loss", "gradients", "gradient_norm", "weights")
    distances = {key: getattr(found, key).value for key in keys}
    bound = {key: getattr(bounds, key) for key in keys}
    return {
        **distances,
        "tolerance": bound,
        "ok": all(distances[key] <= bound[key] for key in keys)
        and found.unequal_start is None
        and found.unequal_holder is None,
        "unequal_initial_weights": found.unequal_start,
        "unequal_holders": found.unequal_holder,
    }


def write_documents(prefix: Path, lengths: Sequence[int], end: int) -> list[numpy.ndarray]:
    """Write an indexed data set of random documents; return them.

    Args:
        prefix: of its files.
        lengths: of the documents, in tokens, their end included.
        end: the token that ends each, above all others.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    drawn = numpy.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(end + 1))
    written = []
    for length in lengths:
        # Every token but the last is below `end`, so that a document ends once.
        tokens = numpy.r_[drawn.integers(0, end, length - 1), end]
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
        written.append(tokens)
    builder.finalize(f"{prefix}.idx")
    return written


def train_whole(
    flags: Sequence[str], recorder: Recorder, note: Callable[..., None] = lambda *given: None
) -> None:
    """Train with one process of stock Megatron and its own attention, a document a micro-batch.

    Args:
        flags: Megatron's.
        recorder: watches the training.
        note: called after each forward pass with losses, tokens, positions and loss mask, each
            of shape [1, tokens].
    """
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    # Documents come from this package's reader, their order too; all else is Megatron's.
    def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
        device = torch.device("cuda" if backend.cuda_is_usable() else "cpu")
        tokens = torch.from_numpy(next(data_iterator)["tokens"].astype(numpy.int64)).to(device)
        places = torch.arange(len(tokens), device=device)[None]
        # The label of a token is the next one; the last token, whose label wraps around, is masked.
        labels = torch.cat([tokens[1:], tokens[:1]])[None]
        mask = (places < len(tokens) - 1).float()
        losses = model(tokens[None], places, None, labels=labels, loss_mask=mask)
        note(losses, tokens[None], places, mask)
        return losses, partial(gpt.loss_func, mask)

    def provide(num_samples: Any) -> tuple[Any, ...]:
        train = document_datasets(num_samples, 1 << 30).splits[0]
        return iter(train[i] for i in range(len(train))), None, None

    # A CPU needs the bridge before Megatron parses the flags.
    own: tuple[str, ...] = ()
    if not backend.cuda_is_usable():
        backend.activate_cpu_backend()
        own = backend.CPU_FLAGS
    # Weighted by tokens: a micro-batch is a document, and documents are of unlike length.
    argv = (
        *flags,
        *own,
        "--micro-batch-size=1",
        "--calculate-per-token-loss",
        "--dataloader-type=external",
    )
    job = StockJob(argv, World.from_environment())
    args = job.parse(parse_and_validate_args, args_defaults={})
    model = job.configure(gpt_config_from_args, args)

    # Weights that do not depend on the layout, as the ranks have them.
    def same_start(chunks: list[Any]) -> list[Any]:
        initialise(chunks, get_args().seed)
        return chunks

    model.post_wrap_hooks.append(same_start)
    config = pretrain_cfg_container_from_args(args, model)
    # The recorder wraps the model after its weights are set.
    recorder.observe_log()
    model.post_wrap_hooks.append(recorder.post_wrap_hook)
    kind = ModelType.encoder_or_decoder
    job.pretrain(pretrain, config, EveryRankProvider(provide), kind, forward_step)
