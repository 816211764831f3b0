"""Slicing, sync, weighting and norm alone, in fp64, on random layouts: 1e-12 from whole tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Layout, Plan, ReplicaShape, StageShape
from megatron_hetero.runtime.gradients import sync as gradient_sync_module
from megatron_hetero.runtime.gradients.memory import main_grad
from megatron_hetero.runtime.gradients.optimizer import build_optimizer
from megatron_hetero.runtime.gradients.sync import GradientSync, set_gradient_sync
from megatron_hetero.runtime.megatron import parallel_state
from tests.runtime.toy_model import ToyRank, in_world, whole_gradients
from tests.runtime.workloads import plan

BOUND = 1e-12
MAX_RANKS = 7


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Replicas of unlike depth and width, some with uneven shares or context parallelism, of 4
    layers and 7 ranks."""
    replicas: list[ReplicaShape] = []
    left = MAX_RANKS
    for _ in range(draw(st.integers(2, 3))):
        if not left:
            break
        stages: list[StageShape] = []
        num_stages = draw(st.integers(1, min(3, left)))
        layers = _split(draw, 4, num_stages)
        for s, count in enumerate(layers):
            width = draw(st.integers(1, min(4, left - (num_stages - s - 1))))
            shares = None
            if width > 1 and draw(st.booleans()):
                shares = tuple(draw(st.integers(1, 3)) for _ in range(width))
            others = num_stages - s - 1
            context = draw(st.integers(1, 2)) if 2 * width <= left - others else 1
            stages.append(StageShape(width, count, shares, context))
            left -= width * context
        replicas.append(ReplicaShape(tuple(stages), draw(st.integers(1, 3))))
    return format_layout(Layout(tuple(replicas)))


def _split(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    cuts = sorted(draw(st.permutations(range(1, total)))[: parts - 1])
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@given(layouts(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_gradients_and_norm_are_those_of_the_whole_batch(
    layout: str, sequence_parallel: bool, per_token: bool, divided: bool, small_buckets: bool
) -> None:
    def check(rank: int) -> None:
        asked = plan(layout)
        toy = ToyRank(asked, rank, sequence_parallel, overlap=True)
        toy.config.calculate_per_token_loss = per_token
        parallel_state.fill(toy.groups)
        weights = [1 + r % 3 for r in range(dist.get_world_size())] if divided else None
        sync = GradientSync([toy.model], toy.groups, asked, weights, 100 if small_buckets else 9999)
        set_gradient_sync(toy.config, sync)
        optimizer = _optimizer(toy, divided)
        for step in (1, 2, 3):
            _run_step(toy, sync, step, per_token)
            expected = _expected(asked, step, per_token)
            norm = _norm(optimizer)
            sync.weights.gather(main_grad)
            for name, parameter in toy.parameters.items():
                whole = expected[name]
                error = (main_grad(parameter) - toy.part(name, whole)).abs().max()
                assert error <= BOUND * whole.abs().max(), (step, name, float(error))
            true_norm = torch.cat([g.reshape(-1) for g in expected.values()]).norm()
            assert abs(norm - true_norm) <= BOUND * true_norm, (step, norm, true_norm)
            toy.model.zero_grad_buffer()
            optimizer.zero_grad()
        assert sync.traffic.ratio == 1.0

    with TemporaryDirectory() as folder:
        in_world(layout, check, Path(folder))


def _expected(asked: Plan, step: int, per_token: bool) -> dict[str, torch.Tensor]:
    count = sum(r.num_micro_batches for r in asked.replicas)
    divisor = _tokens(asked) if per_token else count
    return {name: total / divisor for name, total in whole_gradients(asked, step).items()}


def _tokens(asked: Plan) -> int:
    """Replica r has r + 3 tokens in every micro-batch."""
    return sum((r + 3) * replica.num_micro_batches for r, replica in enumerate(asked.replicas))


def _run_step(toy: ToyRank, sync: GradientSync, step: int, per_token: bool) -> None:
    count = toy.plan.replicas[toy.place.replica].num_micro_batches
    if not per_token:
        # Megatron's schedule divides by the replica's own number of micro-batches.
        toy.backward(step, 1.0 / count)
        sync.finalize([toy.model])
        return
    toy.backward(step)
    counts = toy.is_last and toy.place.context_rank == 0
    tokens = torch.tensor((toy.place.replica + 3) * count if counts else 0)
    sync.finalize([toy.model], tokens)


def _optimizer(toy: ToyRank, divided: bool) -> Any:
    """Megatron's, as the loop builds it; all copies of the model but one are marked."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if toy.groups.copy > 0:
        for parameter in toy.model.parameters():
            parameter.shared = True  # type: ignore[attr-defined]
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0)
    given: dict[str, Any] = {"use_gloo_process_groups": False}
    if divided:
        return build_optimizer(get_megatron_optimizer, config, [toy.model], **given)
    return get_megatron_optimizer(config, [toy.model], **given)


def _norm(optimizer: Any) -> torch.Tensor:
    """Over what Megatron's optimizer counts, in fp64; its own arithmetic is fp32."""
    optimizer.prepare_grads()
    total = torch.zeros((), dtype=torch.float64)
    for gradient in optimizer.chained_optimizers[0].get_grads_for_grad_norm():
        total += gradient.double().square().sum()
    dist.all_reduce(total)
    return total.sqrt()


@pytest.mark.parametrize("divided", [False, True])
def test_two_replicas_of_unlike_width_clip_to_one_norm(divided: bool, tmp_path: Path) -> None:
    """A sum of squares over ranks counts what the narrow replica holds whole more than once."""
    layout = "tp2:4 @2 | tp1:4 @3"

    def check(rank: int) -> None:
        asked = plan(layout)
        toy = ToyRank(asked, rank, False, overlap=False, dtype=torch.float32)
        parallel_state.fill(toy.groups)
        sync = GradientSync([toy.model], toy.groups, asked, [1, 1, 1] if divided else None)
        set_gradient_sync(toy.config, sync)
        optimizer = _optimizer(toy, divided)
        _run_step(toy, sync, 1, per_token=False)
        expected = _expected(asked, 1, per_token=False)
        _, norm, _ = optimizer.step()
        true_norm = torch.cat([g.reshape(-1) for g in expected.values()]).norm()
        assert true_norm > 10  # clipping has something to do
        assert float(norm) == pytest.approx(float(true_norm), rel=1e-6)
        print(json.dumps(float(norm).hex()), flush=True)
        # Adam's first step moves every weight by the learning rate, against its gradient's sign.
        for name, parameter in toy.parameters.items():
            moved = -1e-3 * toy.part(name, expected[name]).sign().float()
            assert torch.allclose(parameter.data, moved, rtol=1e-2)

    in_world(layout, check, tmp_path)
    logs = {log.read_text().splitlines()[-1] for log in tmp_path.glob("rank-*.log")}
    assert len(logs) == 1


def test_buckets_start_in_the_backward_pass(tmp_path: Path) -> None:
    """Buckets start there from the second step on, when the count of each gradient is known; those
    of the layers for which every rank has room, and none of deeper layers is left out."""
    layout = "tp2:3,tp1:1 @2 | tp1:4 @3"

    def check(rank: int) -> None:
        asked = plan(layout)
        # In the third case one rank alone has no room.
        enough = 1 << 30
        cases = ([enough] * 4, True), ([0] * 4, False), ([*[enough] * 3, 0], False)
        for rooms, may_start in cases:
            gradient_sync_module.room_of_rank = partial(_same_room, rooms[rank])  # type: ignore[assignment]
            toy = ToyRank(asked, rank, False, overlap=True)
            # Divided buckets all take room.
            sync = GradientSync(
                [toy.model], toy.groups, asked, [1, 1, 1, 1], 200, aligned=False
            )
            assert len(sync.buckets) > 3
            for step, is_known in ((1, False), (2, True), (3, True)):
                toy.backward(step)
                num_started = len(sync.buckets) if may_start and is_known else 0
                assert sync.num_started == num_started
                sync.finalize([toy.model])
                toy.model.zero_grad_buffer()

    in_world(layout, check, tmp_path)


@pytest.mark.parametrize(
    ("layout", "is_packed"),
    [
        ("tp2:3,tp1:1 @2 | tp2:3,tp1:1 @3", False),
        ("tp1:4 @1 | tp1:1,tp1:3 @2", False),
        ("tp2:4 @1 | tp1:4 @2", True),
    ],
)
def test_only_unlike_shards_are_packed(layout: str, is_packed: bool, tmp_path: Path) -> None:
    """Elsewhere the sync works in Megatron's own buffer; both hand over every byte once."""

    def check(rank: int) -> None:
        asked = plan(layout)
        toy = ToyRank(asked, rank, True, overlap=True)
        sync = GradientSync([toy.model], toy.groups, asked)
        toy.backward(1)
        sync.finalize([toy.model])
        # Here only the narrow replica packs: what the other ranks hold is whole in one bucket.
        packs = is_packed and toy.groups.tensor.size() == 1
        assert (sync.traffic.packed_bytes > 0) == packs
        assert sync.traffic.num_collectives == len(sync.buckets) > 0
        assert sync.traffic.payload_bytes == sync.traffic.bound_bytes

    in_world(layout, check, tmp_path)


ROOMS = {"no room": 0, "room for three": 3 * 2 * 4 * 200, "room for all": 1 << 30}
"""Bytes; a divided bucket of 200 elements in fp32 takes twice its size."""


@pytest.mark.parametrize("divided", [False, True])
def test_buckets_under_way_keep_to_the_room_and_end_with_the_same_bits(
    divided: bool, tmp_path: Path
) -> None:
    layout = "tp2:3,tp1:1 @2 | tp1:4 @3"

    def check(rank: int) -> None:
        asked = plan(layout)
        found, most = [], []
        for room in ROOMS.values():
            gradient_sync_module.room_of_rank = partial(_same_room, room)  # type: ignore[assignment]
            toy = ToyRank(asked, rank, False, overlap=False)
            weights = [1, 2, 1, 1] if divided else None
            sync = GradientSync([toy.model], toy.groups, asked, weights, 200)
            peaks = _watched(sync, room)
            toy.backward(1)
            sync.finalize([toy.model])
            sync.weights.gather(main_grad)
            found.append([main_grad(p).clone() for p in toy.parameters.values()])
            most.append(max(peaks))
        num_packed = sum(r.num_copies > 0 for r in sync.reductions)
        assert most == sorted(most)
        assert (most[0], most[-1]) == (min(2, num_packed), num_packed)
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

    in_world(layout, check, tmp_path)


def _same_room(room: int, *_: Any, **__: Any) -> int:
    return room


def _watched(sync: GradientSync, room: int) -> list[int]:
    """Count the buckets with memory of their own that are under way whenever one starts; check
    that they keep to the room, or are two."""
    pairs = list(zip(sync.reductions, sync.buckets, strict=True))
    peaks = [0]

    def launched(launch: Callable[[float], None], weight: float) -> None:
        launch(weight)
        taken = [r.num_copies * b.num_elements for r, b in pairs if r.is_under_way and r.num_copies]
        assert len(taken) <= 2 or 4 * sum(taken) <= room
        peaks.append(len(taken))

    for reduction in sync.reductions:
        reduction.launch = partial(launched, reduction.launch)  # type: ignore[method-assign]
    return peaks
