"""`python -m megatron_hetero.lab.doctor.start`: the start of a job, judged by Megatron itself.

Reads a question from stdin and writes the answer to stdout (`preflight.start`, which starts this
process). Megatron's parser and checks, up to the configuration of the model, run as in a rank of
the job, for each kind of rank in a process of its own: without a process group, a tokenizer,
loggers, or the GPU, whose compute capability is the planned one's. Transformer Engine counts as
installed, in the release that this machine has, or else in the one that this project is tested
with.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hetero.lab.doctor import refusals
from megatron_hetero.model.script import OF_LIBRARIES
from megatron_hetero.runtime.transformer_engine import bridges

_OF_TRANSFORMER_ENGINE = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ),
}
"""Functions of Transformer Engine by whose absence Megatron's configuration tells that it is not
installed."""

_ROCM_CAPABILITY = "9.0"
"""For cards without a compute capability: torch numbers AMD's below 10."""
_MEMORY_BYTES = 16 << 30
"""Limit of a process that asks: a list in a flag (`[1]*10**10`) is written out."""
_ENOUGH_S = 60.0
"""After so many seconds no further kind of rank is asked."""


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a question: `release` of megatron-core, `refusal` and `untold`."""
    _nothing_is_compiled()
    _transformer_engine_counts_as_installed()
    # Imports Megatron, which must not find the compiler.
    room = import_module("megatron_hetero.lab.doctor.asked_job")
    megatron = room.Megatron(question["vocab_size"])
    entry = room.StockStart if question["is_stock"] else room.PlugInStart
    job = entry(question["argv"], megatron)
    # One rank of each kind: of those that Megatron tells apart by nothing.
    kinds: dict[str, int] = {}
    for number, rank in enumerate(question["ranks"]):
        seen = (job.kind(number), rank["capability"], question["environments"][rank["node"]])
        kinds.setdefault(repr(seen), number)
    # Behind "+" stands the commit of a tree.
    release = import_module("megatron.core").__version__.partition("+")[0]
    found: dict[str, Any] = {"release": release, "refusal": None, "untold": None}
    enough = time.monotonic() + _ENOUGH_S
    for number in kinds.values():
        found.update(_in_a_process(partial(_judged, job, megatron, question, number)))
        if found["refusal"] or time.monotonic() > enough:
            break
    return found


def _judged(job: Any, megatron: Any, question: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Start a rank; return its refusal (`refusal`), or why there is no telling (`untold`)."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    _enter(question, number)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            job.start(number, len(question["ranks"]))
        # Its parser leaves by SystemExit, and its flags may raise anything.
        except BaseException as error:
            if megatron.error is None:
                return refusals.of_plug_in(error, number)
            return refusals.of_megatron(megatron.error, errors.getvalue(), number)
    return {}


def _enter(question: Mapping[str, Any], number: int) -> None:
    """Give this process the variables and the card of a rank."""
    rank = question["ranks"][number]
    for name in [name for name in os.environ if OF_LIBRARIES.fullmatch(name)]:
        del os.environ[name]
    os.environ.update(question["environments"][rank["node"]])
    os.environ.update(RANK=str(number), WORLD_SIZE=str(len(question["ranks"])), LOCAL_RANK="0")
    major, minor = map(int, (rank["capability"] or _ROCM_CAPABILITY).split("."))
    card = SimpleNamespace(major=major, minor=minor, name="the planned GPU")
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("current_device", 0),
        ("get_device_capability", (major, minor)),
        ("get_device_properties", card),
        ("get_device_name", card.name),
    ):
        setattr(torch.cuda, name, lambda *_, _value=value: _value)


def _in_a_process(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a process of its own, which changes nothing here."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        with open(writing, "w", encoding="utf-8") as pipe:
            json.dump(answer(), pipe)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(process, 0)
    said: dict[str, Any] = json.loads(text) if text and not status else {"untold": "it died"}
    return said


def _nothing_is_compiled() -> None:
    """Leave functions as they are written: to import torch's compiler takes as long as Megatron."""

    def plain(function: Any = None, **_: Any) -> Any:
        return function if function is not None else plain

    torch.compile = plain


def _transformer_engine_counts_as_installed() -> None:
    try:
        release = version("transformer-engine")
    except PackageNotFoundError:
        release = bridges.VERSION
    utils = import_module("megatron.core.utils")
    utils._te_version = utils.PkgVersion(release)
    for module, names in _OF_TRANSFORMER_ENGINE.items():
        for name in names:
            if getattr(import_module(module), name, ...) is None:
                setattr(import_module(module), name, _is_never_called)


def _is_never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing computes here")


def main() -> None:
    """Answer on the standard output, which holds the answer alone."""
    out = os.dup(1)
    os.dup2(2, 1)
    said = answer(json.load(sys.stdin))
    with open(out, "w", encoding="utf-8") as answers:
        json.dump(said, answers)


if __name__ == "__main__":
    main()
