"""Seconds of embedding, decoder layer and head, measured on the model that would be trained.

Megatron builds and wraps the model as for a job. Before it makes an optimizer, a hook runs whole
forward and backward passes and records the time at two places: between the embedding and the first
decoder layer, and between the last layer and the final norm. In the backward pass the gradients of
these two tensors mark the same places. The times therefore include recomputation, fused kernels,
tensor-parallel communication and the accumulation into the main gradients, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args

from megatron_hetero.cost.work.profile import Piece
from megatron_hetero.runtime import backend

_MIN_REPEATS, _MAX_REPEATS = 5, 200
_WARM_UP = 3


class ProbeDoneError(Exception):
    """Exit from Megatron's `pretrain` once everything is measured; carries the result."""

    def __init__(self, result: Sequence[PieceTime | TooLarge]) -> None:
        super().__init__("measured")
        self.result = tuple(result)


@dataclass(frozen=True)
class PieceTime:
    """Median times of a piece over `num_repeats` passes.

    `spread` is the interquartile range of the time of the whole pass, over its median.
    """

    piece: Piece
    micro_batch_size: int
    forward_s: float
    backward_s: float
    num_repeats: int
    spread: float


@dataclass(frozen=True)
class TooLarge:
    """A micro-batch size beyond this GPU's memory, even with few layers and no optimizer."""

    micro_batch_size: int


@dataclass(frozen=True)
class PieceProbe:
    """Observer of a job (`runtime.job.entry.Observer`) that measures instead of training.

    Each micro-batch size is measured for about `seconds`.
    """

    micro_batch_sizes: tuple[int, ...]
    seconds: float

    def observe_log(self) -> None:
        """Ignore the log."""

    def recorded(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the data sets as they are; none is ever read."""
        return provider

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Measure the wrapped model.

        Raises:
            ProbeDoneError: always, with the measured times.
        """
        result: list[PieceTime | TooLarge] = []
        for size in self.micro_batch_sizes:
            try:
                result += _measure(model[0], size, self.seconds)
            except torch.cuda.OutOfMemoryError:
                # Sizes need not ascend, so the next one may fit.
                result.append(TooLarge(size))
                torch.cuda.empty_cache()
        raise ProbeDoneError(result)


class _Stopwatch:
    """Marks in the device's order, and the seconds between marks."""

    def __init__(self) -> None:
        self._on_gpu = backend.cuda_is_usable()
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record the present moment in the device's own stream of work."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        """Return the seconds between neighbouring marks."""
        if self._on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def _measure(wrapped: Any, size: int, seconds: float) -> list[PieceTime]:
    gpt = get_attr_wrapped_model(wrapped, "decoder", return_model_obj=True)
    # The time of all layers over their number is that of one layer.
    num_layers = len(gpt.decoder.layers)
    batch = _batch(size)
    runs: list[list[float]] = []
    for _ in range(_WARM_UP):
        _pass(wrapped, gpt, batch)
    start = time.perf_counter()
    # As long as `seconds`, but for bounds on the number; all ranks stop together.
    while len(runs) < _MAX_REPEATS and (
        len(runs) < _MIN_REPEATS or not _all_agree(time.perf_counter() - start > seconds)
    ):
        runs.append(_pass(wrapped, gpt, batch))
    # Gradients of all passes have added up in the main buffer, which the next size starts empty.
    wrapped.zero_grad_buffer()
    # Seven marks of a pass enclose six intervals, each with its median over the runs.
    columns = [median(column) for column in zip(*runs, strict=True)]
    # Spread: distance of the quartiles over the median, of whole passes.
    totals = sorted(sum(run) for run in runs)
    spread = (totals[3 * len(totals) // 4] - totals[len(totals) // 4]) / median(totals)

    def piece(name: Piece, forward_s: float, backward_s: float) -> PieceTime:
        return PieceTime(name, size, forward_s, backward_s, len(runs), spread)

    embedding, layers, head, head_back, layers_back, embedding_back = columns
    return [
        piece("embedding", embedding, embedding_back),
        piece("decoder_layer", layers / num_layers, layers_back / num_layers),
        piece("head", head, head_back),
    ]


def _pass(wrapped: Any, gpt: Any, batch: dict[str, Any]) -> list[float]:
    """Measure one pass: seconds of embedding, layers, head forward, and back."""
    clock = _Stopwatch()
    with _marked(gpt, clock):
        clock.mark()
        losses = wrapped(**batch)
        loss = losses.float().mean()
        clock.mark()
        loss.backward()
        clock.mark()
    return clock.intervals_s()


@contextmanager
def _marked(gpt: Any, clock: _Stopwatch) -> Iterator[None]:
    """Mark both borders of the decoder's layers, in the forward and the backward pass."""

    def border(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Megatron gives the decoder its input by name, the norm by position.
        x_SBH = given[0] if given else named["hidden_states"]
        clock.mark()
        x_SBH.register_hook(lambda _gradient: clock.mark())

    handles = [
        module.register_forward_pre_hook(border, with_kwargs=True)
        for module in (gpt.decoder, gpt.decoder.final_layernorm)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batch(size: int) -> dict[str, Any]:
    """Make one micro-batch of random tokens, with the mask of Megatron's data loader.

    Shapes: tokens, labels, positions and loss mask `[b, s]`; attention mask `[b, 1, s, s]`.
    """
    args = get_args()
    device = torch.device("cpu")
    if backend.cuda_is_usable():
        device = torch.device("cuda", torch.cuda.current_device())
    length = args.seq_length
    generator = torch.Generator().manual_seed(1234)
    tokens = torch.randint(0, args.padded_vocab_size, (size, length + 1), generator=generator)
    positions = torch.arange(length).expand(size, length).contiguous()
    # True masks a place out: a token sees no later token.
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return {
        "input_ids": tokens[:, :-1].contiguous().to(device),
        "position_ids": positions.to(device),
        "attention_mask": mask.expand(size, 1, length, length).contiguous().to(device),
        "labels": tokens[:, 1:].contiguous().to(device),
    }


def _all_agree(mine: bool) -> bool:
    """Return True on all ranks if it is True on any.

    All ranks then make equally many passes; otherwise a tensor-parallel group would wait for ever.
    """
    if torch.distributed.get_world_size() == 1:
        return mine
    device = "cuda" if backend.cuda_is_usable() else "cpu"
    vote = torch.tensor([int(mine)], device=device)
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
    return bool(vote.item())
