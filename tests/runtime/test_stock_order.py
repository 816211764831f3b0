"""1F1B as a programme is what Megatron's own schedule does, message by message.

Megatron's function runs for real; only what it schedules (the two steps and the communicator)
writes down that it was called.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.runtime import backend
from megatron_hetero.runtime.local_launch import Job, run_jobs
from megatron_hetero.schedule.one_f_one_b import one_f_one_b


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_1f1b_is_megatrons(num_stages: int, tmp_path: Path) -> None:
    sizes = (1, 2, num_stages, 9)

    def record(rank: int) -> None:
        backend.activate_cpu_backend()
        for m in sizes:
            for stage in range(num_stages):
                calls = _megatrons_calls(num_stages, stage, m)
                (tmp_path / f"{m}-{stage}").write_text(" ".join(calls))

    run_jobs([Job("record", 1, record, tmp_path / "run")], 120)
    for m in sizes:
        for stage, programme in enumerate(one_f_one_b(num_stages, m).programmes):
            ours = [o.kind for i in programme for o in i if o.micro_batch >= 0]
            assert (tmp_path / f"{m}-{stage}").read_text().split() == ours


def _megatrons_calls(num_stages: int, stage: int, num_micro_batches: int) -> list[str]:
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    calls: list[str] = []
    tensor = torch.zeros(1)

    class Communicator:
        """Megatron's six methods; the ends of the pipeline have no partner."""

        config = None
        is_pp_first_stage = stage == 0
        is_pp_last_stage = stage == num_stages - 1
        total_stages = num_stages
        current_stage = stage

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                parts = name.split("_recv_")
                kinds = [parts[0], *(f"recv_{p}" for p in parts[1:])]
                for kind in kinds:
                    backwards = kind in ("recv_forward", "send_backward")
                    if not (self.is_pp_first_stage if backwards else self.is_pp_last_stage):
                        calls.append(kind)
                return [tensor]

            return call

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return [tensor.clone()], torch.zeros([], dtype=torch.int)

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        calls.append("backward")
        return [tensor]

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    config = SimpleNamespace(
        overlap_p2p_comm=False,
        finalize_model_grads_func=None,
        timers=None,
        no_sync_func=nullcontext,
        grad_sync_func=None,
        num_microbatches_with_partial_activation_checkpoints=None,
        variable_seq_lengths=False,
        sequence_parallel=False,
        hidden_size=1,
        deallocate_pipeline_outputs=False,
    )
    model = torch.nn.Linear(1, 1)
    model.config = config
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=None,
        data_iterator=None,
        model=model,
        num_microbatches=num_micro_batches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Communicator(),
        pg_collection=ProcessGroupCollection(tp=group, cp=group),
    )
    return calls
