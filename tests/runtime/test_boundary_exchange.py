"""Boundaries over gloo, in fp64: what arrives has the bits of what was sent, and crosses once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.parallel.boundary import Boundary
from megatron_hetero.runtime.parallel.building import build_groups
from megatron_hetero.runtime.parallel.context_place import ContextPlace
from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator, always_send_parts
from tests.runtime.toy_model import in_world
from tests.runtime.workloads import plan

SEQUENCE, HIDDEN = 24, 5

_stages = st.sampled_from(["tp1", "tp2", "tp3", "tp4", "tp1cp2", "tp2cp2", "tp1cp3", "tp3(2:1:1)"])
_UNEVEN = "tp2cp2(2:1)", "tp1cp3(3:2:1)"


@given(_stages, _stages, st.booleans(), st.booleans(), st.booleans())
@example("tp2cp2", "tp2", False, False, True)
@example(*_UNEVEN, False, False, True)
@example(*_UNEVEN, True, False, False)
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_activations_and_gradients_arrive_whole(
    senders: str, receivers: str, sequence_parallel: bool, own_lengths: bool, through_leaders: bool
) -> None:
    """`through_leaders`: as small messages go; else in parts.

    `own_lengths`: each message has another, told by its sender, and two are posted ahead.
    """
    layout = f"{senders}:1,{receivers}:1 @1"

    def check(rank: int) -> None:
        if not through_leaders:
            always_send_parts()
        asked = plan(layout)
        place = rank_table(asked)[rank]
        groups = build_groups(asked, timedelta(minutes=1), own_lengths, SEQUENCE)
        config = SimpleNamespace(
            sequence_parallel=sequence_parallel, pipeline_dtype=torch.float64, hidden_size=HIDDEN
        )
        boundary = PipelineCommunicator(groups, config, sequence_parallel).boundaries[0]
        boundary.begin()
        width = groups.tensor.size()

        def own(whole: torch.Tensor) -> torch.Tensor:
            size, rank = groups.context.size(), groups.context.rank()
            if size > 1:
                equal = ContextPlace((len(whole) // size,) * size, rank)
                whole = whole[(groups.context_place or equal).positions()]
            parts = whole.chunk(width) if sequence_parallel else [whole] * width
            return parts[place.tensor_rank]

        lengths = (24, 48, 24, 72) if own_lengths else (SEQUENCE,) * 4
        activations, gradients = (
            [_random(seed + number, length) for number, length in enumerate(lengths)]
            for seed in (0, 100)
        )
        if place.stage == 0:
            for activation in activations:
                nbytes = activation.nbytes
                _send(boundary, own(activation), nbytes, sequence_parallel, own_lengths)
        expected = gradients if place.stage == 0 else activations
        announced = own_lengths and place.stage == 1

        def post(number: int) -> None:
            if number < len(expected):
                shape = tuple(own(expected[number]).shape)
                boundary.post_receive(None if announced else shape)

        post(0)
        for number, whole in enumerate(expected):
            post(number + 1)
            boundary.ask_for_announced()
            assert torch.equal(boundary.take(), own(whole))
            if place.stage == 1:
                gradient = gradients[number]
                _send(boundary, own(gradient), gradient.nbytes, sequence_parallel, False)
        boundary.finish_sends()

    with TemporaryDirectory() as folder:
        in_world(layout, check, Path(folder))


def _random(seed: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((length, 1, HIDDEN), dtype=torch.float64, generator=generator)


def _send(
    boundary: Boundary, tensor: torch.Tensor, whole: int, sequence_parallel: bool, announce: bool
) -> None:
    """Send, and check that the stage hands over the bytes of one activation, no more."""
    boundary.send(tensor, announce)
    handed = sum(op.tensor.nbytes for op in boundary.send_ops(tensor, sequence_parallel))
    counted = torch.tensor(handed)
    dist.all_reduce(counted, group=boundary._groups.stage)
    assert int(counted) == whole
