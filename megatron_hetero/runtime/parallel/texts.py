"""Texts of ranks on every rank; as bytes, so that nothing is unpickled."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_texts(text: str) -> list[str]:
    """[rank] -> its text, on every rank.  Collective."""
    device = torch.cuda.current_device()
    own = _bytes_of(text)
    # Lengths first: the parts of a gather have to be equally long.
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    longest = max(int(size.item()) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    # The last byte only keeps a text from being empty.
    return [
        bytes(raw[: int(size.item()) - 1].tolist()).decode()
        for raw, size in zip(found, sizes, strict=True)
    ]


def broadcast_text(text: str | None) -> str:
    """Return the text of rank 0 on every rank; others give None.  Collective."""
    own = None if text is None else _bytes_of(text)
    size = torch.tensor([0 if own is None else own.numel()], dtype=torch.int64)
    size = size.to(torch.cuda.current_device())
    dist.broadcast(size, 0)
    if own is None:
        own = torch.empty(int(size.item()), dtype=torch.uint8, device=size.device)
    dist.broadcast(own, 0)
    return bytes(own[:-1].tolist()).decode()


def _bytes_of(text: str) -> torch.Tensor:
    """Return a text as bytes on the device, never none."""
    raw = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    return raw.to(torch.cuda.current_device())
