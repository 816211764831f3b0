"""Shard tables of all ranks, on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist

from megatron_hetero.runtime.parallel.shards import ParameterShard


def all_shards(shards: Mapping[str, ParameterShard]) -> list[dict[str, ParameterShard]]:
    """Gather every rank's shards by name, [rank]. Collective; sent as JSON in byte tensors."""
    device = torch.cuda.current_device()
    text = json.dumps([asdict(s) for s in shards.values()]).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    size = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s.item()) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [
        {
            entry["name"]: ParameterShard.from_json(entry)
            for entry in json.loads(bytes(raw[: int(n.item())].tolist()))
        }
        for raw, n in zip(gathered, sizes, strict=True)
    ]
