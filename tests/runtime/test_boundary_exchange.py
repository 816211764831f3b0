"""Boundaries over gloo, in fp64: what arrives has the bits of what was sent, and crosses once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.boundary import Boundary, PipelineCommunicator
from megatron_hetero.runtime.groups import build_groups
from tests.runtime.toy_model import in_world
from tests.runtime.workloads import plan

SEQUENCE, HIDDEN = 12, 5


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]), st.booleans())
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_activations_and_gradients_arrive_whole(
    senders: int, receivers: int, sequence_parallel: bool
) -> None:
    layout = f"tp{senders}:1,tp{receivers}:1 @1"

    def check(rank: int) -> None:
        asked = plan(layout)
        place = rank_table(asked)[rank]
        groups = build_groups(asked, timedelta(minutes=1))
        config = SimpleNamespace(sequence_parallel=sequence_parallel, pipeline_dtype=torch.float64)
        boundary = PipelineCommunicator(groups, config).boundaries[0]
        boundary.begin()
        width = groups.tensor.size()

        def own(whole: torch.Tensor) -> torch.Tensor:
            parts = whole.chunk(width) if sequence_parallel else [whole] * width
            return parts[place.tensor_rank]

        for number in range(3):
            activation, gradient = (_random(2 * number + k) for k in range(2))
            first, second = (activation, gradient) if place.stage == 0 else (gradient, activation)
            if place.stage == 0:
                _send(boundary, own(first), activation.nbytes, sequence_parallel)
            boundary.post_receive(tuple(own(second).shape))
            arrived = boundary.take()
            assert torch.equal(arrived, own(second))
            if place.stage == 1:
                _send(boundary, own(first), gradient.nbytes, sequence_parallel)
        boundary.finish_sends()

    with TemporaryDirectory() as folder:
        in_world(layout, check, Path(folder))


def _random(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((SEQUENCE, 1, HIDDEN), dtype=torch.float64, generator=generator)


def _send(boundary: Boundary, tensor: torch.Tensor, whole: int, sequence_parallel: bool) -> None:
    """Send, and check that the stage hands over the bytes of one activation, no more."""
    boundary.send(tensor)
    handed = sum(op.tensor.nbytes for op in boundary.send_ops(tensor, sequence_parallel))
    counted = torch.tensor(handed)
    dist.all_reduce(counted, group=boundary._groups.tensor)
    assert int(counted) == whole
