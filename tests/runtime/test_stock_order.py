"""1F1B and interleaved 1F1B as programmes are what Megatron's own schedules do.

Megatron's functions run for real; only what they schedule (the two steps and the communicator)
writes down that it was called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.schedule.of_plan import order_of
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_1f1b_is_megatrons(num_stages: int, tmp_path: Path) -> None:
    sizes = (1, 2, num_stages, 9)

    def record(m: int, stage: int) -> str:
        return " ".join(_plain(num_stages, stage, m))

    _record(record, sizes, num_stages, tmp_path)
    for m in sizes:
        for stage, programme in enumerate(one_f_one_b(num_stages, m).programmes):
            ours = [o.kind for i in programme for o in i if o.micro_batch >= 0]
            assert (tmp_path / f"{m}-{stage}").read_text().split() == ours


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_interleaved_1f1b_is_megatrons(num_stages: int, num_chunks: int, tmp_path: Path) -> None:
    """Forwards with their chunks, in one order with the backwards."""
    sizes = (num_stages, 2 * num_stages, 3 * num_stages)

    def record(m: int, stage: int) -> str:
        return "".join(_chunked(num_stages, num_chunks, stage, m))

    _record(record, sizes, num_stages, tmp_path)
    for m in sizes:
        schedule = interleaved(list(range(num_stages)) * num_chunks, m)
        for stage, programme in enumerate(schedule.programmes):
            assert (tmp_path / f"{m}-{stage}").read_text() == order_of(programme)


def _record(
    calls: Callable[[int, int], str], sizes: tuple[int, ...], num_stages: int, folder: Path
) -> None:
    def record(rank: int) -> None:
        backend.activate_cpu_backend()
        for m in sizes:
            for stage in range(num_stages):
                (folder / f"{m}-{stage}").write_text(calls(m, stage))

    run_jobs([LocalJob("record", 1, record, folder / "run")], 120)


def _plain(num_stages: int, stage: int, num_micro_batches: int) -> list[str]:
    """Kinds of operations of `forward_backward_pipelining_without_interleaving`, in order."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    calls: list[str] = []
    tensor = torch.zeros(1)

    def communicate(name: str) -> Any:
        """The ends of the pipeline have no partner."""
        first, *others = name.split("_recv_")
        for kind in (first, *(f"recv_{other}" for other in others)):
            backwards = kind in ("recv_forward", "send_backward")
            if stage != (0 if backwards else num_stages - 1):
                calls.append(kind)
        return [tensor]

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return [tensor.clone()], torch.zeros([], dtype=torch.int)

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        calls.append("backward")
        return [tensor]

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    schedules.forward_backward_pipelining_without_interleaving(
        model=_model(num_stages),
        **_arguments(num_stages, stage, num_micro_batches, communicate),
    )
    return calls


def _chunked(num_stages: int, num_chunks: int, stage: int, num_micro_batches: int) -> list[str]:
    """Passes of `forward_backward_pipelining_with_interleaving`, as an order has them."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    calls: list[str] = []
    chunk_of: dict[int, int] = {}
    kept = []
    tensor = torch.zeros(1)

    def communicate(name: str) -> Any:
        return (tensor, tensor) if name.endswith("recv_forward_backward") else tensor

    def forward_step(*args: Any, vp_stage: int, **kwargs: Any) -> Any:
        calls.append(f"F{vp_stage or ''}")
        output = tensor.clone()
        kept.append(output)  # So that no two outputs ever have one id.
        chunk_of[id(output)] = vp_stage
        return output, torch.zeros([], dtype=torch.int)

    def backward_step(inputs: Any, output: Any, *args: Any) -> Any:
        calls.append(f"B{chunk_of[id(output)] or ''}")
        return tensor

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    schedules.forward_backward_pipelining_with_interleaving(
        model=[_model(num_stages, num_chunks) for _ in range(num_chunks)],
        **_arguments(num_stages, stage, num_micro_batches, communicate, num_chunks),
    )
    return calls


def _model(num_stages: int, num_chunks: int = 1) -> Any:
    import torch

    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(
        overlap_p2p_comm=False,
        overlap_p2p_comm_warmup_flush=False,
        batch_p2p_comm=True,
        overlap_moe_expert_parallel_comm=False,
        microbatch_group_size_per_vp_stage=num_stages,
        virtual_pipeline_model_parallel_size=num_chunks,
        finalize_model_grads_func=None,
        timers=None,
        no_sync_func=nullcontext,
        grad_sync_func=None,
        param_sync_func=None,
        num_microbatches_with_partial_activation_checkpoints=None,
        variable_seq_lengths=False,
        sequence_parallel=False,
        hidden_size=1,
        deallocate_pipeline_outputs=False,
    )
    model.model_type = None
    return model


def _arguments(
    num_stages: int,
    stage: int,
    num_micro_batches: int,
    communicate: Callable[[str], Any],
    num_chunks: int = 1,
) -> dict[str, Any]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    class Communicator:
        config = None
        is_pp_first_stage = stage == 0
        is_pp_last_stage = stage == num_stages - 1
        total_stages = num_stages
        current_stage = stage
        virtual_pipeline_model_parallel_size = num_chunks
        pp_group = SimpleNamespace(size=lambda: num_stages, rank=lambda: stage)

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: communicate(name)

    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return {
        "forward_step_func": None,
        "data_iterator": [None] * num_chunks,
        "num_microbatches": num_micro_batches,
        "seq_length": 1,
        "micro_batch_size": 1,
        "p2p_communicator": Communicator(),
        "pg_collection": ProcessGroupCollection(tp=alone, cp=alone),
    }
