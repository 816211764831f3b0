"""Texts of all ranks on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_texts(text: str) -> list[str]:
    """[rank] -> its text, on every rank; as bytes, so that nothing is unpickled.  Collective."""
    device = torch.cuda.current_device()
    own = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    longest = max(int(size.item()) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [
        bytes(raw[: int(size.item()) - 1].tolist()).decode()
        for raw, size in zip(found, sizes, strict=True)
    ]
