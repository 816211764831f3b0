"""Ranks of `test_tensor_overlap`: Transformer Engine's own `initialize_ub` over gloo.

    python -m tests.runtime.megatron.overlap_ranks SIZE FOLDER GROUPS

Its compiled classes write down what they are given, in FOLDER/RANK.json; nothing else stands in for
anything.  Megatron is imported once, and the ranks are forked.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def rank_main(rank: int, size: int, folder: Path, groups: list[list[int]]) -> None:
    """Be a rank: make its buffers, then as Megatron does, and write down what was made."""
    import torch.distributed as dist
    import transformer_engine_torch as tex
    from megatron.training import global_vars, initialize

    from megatron_hetero.runtime.megatron import tensor_overlap

    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    seen: list[Any] = []

    class Helper:
        def __init__(self, world: dist.ProcessGroup, domain: dist.ProcessGroup) -> None:
            seen.append([dist.get_process_group_ranks(g) for g in (world, domain)])

    class Buffer:
        def __init__(self, shape: list[int], dtype: Any, helper: Helper, *given: Any, **named: Any):
            seen.append([shape, str(dtype), next(n for n in given if isinstance(n, int))])

    tex.CommOverlapHelper, tex.CommOverlap, tex.CommOverlapP2P = Helper, Buffer, Buffer
    tex.CommOverlapType = type("CommOverlapType", (), {"RS": "RS", "AG": "AG"})
    width = next((len(group) for group in groups if rank in group), 1)
    global_vars._GLOBAL_ARGS = SimpleNamespace(
        tp_comm_overlap_cfg=None, seq_length=64, micro_batch_size=1 + rank // 4,
        context_parallel_size=1, hidden_size=32, fp8=None, first_last_layers_bf16=False,
        tensor_model_parallel_size=width, tp_comm_bootstrap_backend="gloo",
    )  # fmt: skip
    tensor_overlap.apply(groups, timedelta(seconds=60), "gloo")
    # Megatron's own call comes later, and collectives of the job work as before.
    before = len(seen)
    initialize._initialize_tp_communicators()
    assert len(seen) == before
    total: list[Any] = [None] * size
    dist.all_gather_object(total, rank)
    assert total == list(range(size))
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main(size: int, folder: Path, groups: list[list[int]]) -> int:
    """Import Megatron and fork the ranks; return 0 if all of them end well."""
    from megatron_hetero.runtime.transformer_engine import layers

    if (reason := layers.provide()) is not None:
        sys.exit(f"no Transformer Engine on this CPU: {reason}")
    from megatron_hetero.runtime import backend

    backend.activate_cpu_backend()
    import megatron.training  # noqa: F401

    os.environ["UB_SKIPMC"] = "1"
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            code = 1
            try:
                rank_main(rank, size, folder, groups)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])))
