"""Speed of a device and of the links alone, and the libraries' part of the memory.

Rates of products, attention, memory and messages are for people, for `cluster.yaml`, and to notice
a faulty card at once; plans take their times from the model's pieces (`lab.probe.pieces`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.cluster.inventory.measurements import LinkFit, fit_link
from megatron_hetero.runtime import backend

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS = 0.3
_MESSAGE_BYTES = (4096, 65536, 1 << 20, 8 << 20)


@dataclass(frozen=True)
class Rate:
    """A measured rate: FLOP/s for products and attention, bytes/s for memory."""

    what: str
    shape: tuple[int, ...]
    value: float


def device_rates(hidden: int, ffn: int, heads: int, tokens: int, precision: str) -> list[Rate]:
    """Measure products with the shapes of a layer, attention, and a copy through memory.

    Args:
        hidden: hidden size of the model.
        ffn: width of the MLP.
        heads: number of attention heads.
        tokens: number of rows of each product.
        precision: a key of `_TYPES`.
    """
    device = _device()
    dtype = _TYPES[precision]
    rates = []
    # Products of a layer: query, key and value together; into the MLP; out of the
    # MLP. [tokens, k] x [k, n].
    for n, k in ((3 * hidden, hidden), (ffn, hidden), (hidden, ffn)):
        a = torch.randn(tokens, k, device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        seconds = _seconds(partial(torch.mm, a, b))
        rates.append(Rate("product", (tokens, n, k), 2.0 * tokens * n * k / seconds))
    size = hidden // heads
    q, k_, v = (torch.randn(1, heads, tokens, size, device=device, dtype=dtype) for _ in range(3))
    seconds = _seconds(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k_, v, is_causal=True)
    )
    # Causal: half of the two products of 2 heads x tokens^2 x size FLOP each.
    rates.append(Rate("attention", (heads, tokens, size), 2.0 * heads * tokens**2 * size / seconds))
    # fp32, 256 MiB on a GPU: more than any cache; read once and written once.
    source = torch.randn((64 << 20) // 4 if device.type == "cpu" else 64 << 20, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source))
    rates.append(Rate("memory", (source.numel(),), 2.0 * 4 * source.numel() / seconds))
    return rates


def free_bytes() -> int | None:
    """Return the free memory of this GPU, in bytes; None on a CPU."""
    return torch.cuda.mem_get_info()[0] if backend.cuda_is_usable() else None


def context_bytes() -> int | None:
    """Return what CUDA takes of this process's GPU before Megatron starts; None on a CPU.

    A layer of torch's runs forward and backward first, for CUDA loads kernels at their first use.
    Other processes must not use the card.
    """
    if not backend.cuda_is_usable():
        return None
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, device=device)
    layer(torch.ones(16, 1, 64, device=device)).sum().backward()
    torch.cuda.synchronize()
    return _untensored_bytes()


def communicator_bytes() -> int | None:
    """Return what a new NCCL communicator of ranks 0 and 1 takes of this GPU; None on a CPU, with a
    single rank, on other ranks, and where no more memory is taken than before.

    Collective over the world.
    """
    if not backend.cuda_is_usable() or dist.get_world_size() < 2:
        return None
    # The message is there before, so that only the communicator is new.
    message = torch.ones(1 << 20, device=_device())
    torch.cuda.synchronize()
    before = _untensored_bytes()
    group = dist.new_group([0, 1])
    # All ranks make the group, as torch requires; two of them use it.
    if dist.get_rank() > 1:
        return None
    dist.all_reduce(message, group=group)
    torch.cuda.synchronize()
    return max(0, _untensored_bytes() - before) or None


def _untensored_bytes() -> int:
    """Return what is taken of this GPU beside the blocks of torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def link_between(one: int, other: int) -> LinkFit:
    """Fit a direction's latency and bandwidth through messages of growing size between two ranks.

    Collective over the world; all ranks get the fit.
    """
    rank, device = dist.get_rank(), _device()
    times = []
    for num_bytes in _MESSAGE_BYTES:
        # fp32: 4 bytes for each element.
        message = torch.zeros(num_bytes // 4, device=device)
        dist.barrier()
        seconds = 0.0
        if rank == one:
            seconds = _ping_pong_s(message, other, 20, is_first=True)
        elif rank == other:
            seconds = _ping_pong_s(message, one, 20, is_first=False)
        found = torch.tensor([seconds], dtype=torch.float64, device=device)
        dist.broadcast(found, one)
        times.append((float(num_bytes), float(found.item())))
    return fit_link(times)


def all_reduce_rates(group: dist.ProcessGroup) -> list[tuple[int, float]]:
    """Measure all-reduces over a group of this rank; return (bytes, seconds) by size."""
    device, found = _device(), []
    for num_bytes in _MESSAGE_BYTES:
        values = torch.zeros(num_bytes // 4, device=device)

        def reduce(values: Any = values) -> Any:
            return dist.all_reduce(values, group=group)

        # A fixed count, or ranks would disagree about when to stop.
        found.append((num_bytes, _counted_s(reduce, 10)))
    return found


def _ping_pong_s(message: torch.Tensor, other: int, count: int, *, is_first: bool) -> float:
    """Measure a round trip; return half of it, in seconds."""

    def there_and_back() -> None:
        if is_first:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    return _counted_s(there_and_back, count) / 2


def _counted_s(work: Callable[[], Any], count: int) -> float:
    # The first calls connect, load kernels and choose algorithms.
    for _ in range(2):
        work()
    times = []
    for _ in range(count):
        _synchronise()
        start = time.perf_counter()
        work()
        _synchronise()
        times.append(time.perf_counter() - start)
    return median(times)


def _seconds(work: Callable[[], Any]) -> float:
    """Return the median duration of some work, repeated for about `_SECONDS`."""
    # A first measurement says how many repeats the time allows.
    first = _counted_s(work, 1)
    return _counted_s(work, max(3, min(100, round(_SECONDS / max(first, 1e-6)))))


def _synchronise() -> None:
    if backend.cuda_is_usable():
        torch.cuda.synchronize()


def _device() -> torch.device:
    if backend.cuda_is_usable():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
