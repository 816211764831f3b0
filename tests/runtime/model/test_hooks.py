"""Hooks on a model between its construction and its optimizer: equal weights, counted once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import global_vars

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.gradients.sync import gradient_sync
from megatron_hetero.runtime.megatron import parallel_state
from megatron_hetero.runtime.model import hooks
from tests.runtime.model.test_custom_spec import model as unmarked
from tests.runtime.toy_model import ToyRank, in_world, whole_gradients
from tests.runtime.workloads import plan

LAYOUT = "tp2:2,tp1:2 @2 | tp1:4 @1"


def gathered(value: torch.Tensor) -> list[torch.Tensor]:
    """[rank] -> its value."""
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return found


def test_a_sync_makes_holders_equal_and_has_each_element_counted_once(tmp_path: Path) -> None:
    asked = plan(LAYOUT)

    def check(rank: int) -> None:
        toy = ToyRank(asked, rank, False, overlap=False)
        assert hooks.weights_are_equal([toy.model])  # without a sync there is nothing to compare
        for parameter in toy.parameters.values():
            parameter.data.normal_(generator=torch.Generator().manual_seed(rank))
        hook = hooks.synchronise_hook(asked, toy.groups)
        assert hook([toy.model]) == [toy.model]
        assert gradient_sync(toy.config) is not None
        assert hooks.weights_are_equal([toy.model])
        # As Megatron's norm counts: not what is marked, and of copies in a group the first alone.
        counted = sum(
            p.numel()
            for p in toy.parameters.values()
            if not getattr(p, "shared", False)
            and (p.tensor_model_parallel or toy.groups.tensor.rank() == 0)
        )
        total = torch.tensor(counted)
        dist.all_reduce(total)
        assert int(total) == sum(g.numel() for g in whole_gradients(asked, 1).values())
        if rank == 3:
            toy.parameters["decoder.layers.0.mlp.linear_fc1.weight"].data[0, 0] += 1
        # The ranks that hold it too hear of it; the second stage does not hold the layer.
        heard = gathered(torch.tensor(hooks.weights_are_equal([toy.model])))
        assert [bool(equal) for equal in heard] == [False, True, True, False]

    in_world(LAYOUT, check, tmp_path)


def test_initial_weights_are_one_model_however_it_is_divided(tmp_path: Path) -> None:
    layout = "tp2:4 @1 | tp1:4 @1"

    def check(rank: int) -> None:
        toy = ToyRank(plan(layout), rank, False, overlap=False, dtype=torch.float32)
        torch.manual_seed(rank)
        hooks.initial_weights_hook(7)([toy.model])
        for name in sorted(toy.parameters):
            own = toy.parameters[name].data
            whole = torch.empty(toy.shards[name].global_shape)
            if rank == 2:  # which holds all of it
                whole.copy_(own)
            dist.broadcast(whole, src=2)
            assert torch.equal(own, toy.part(name, whole))
        drawn = toy.parameters["decoder.layers.0.mlp.linear_fc1.weight"].data.clone()
        assert drawn.std() > 0
        hooks.initial_weights_hook(8)([toy.model])
        again = toy.parameters["decoder.layers.0.mlp.linear_fc1.weight"].data
        assert not torch.equal(again, drawn)

    in_world(layout, check, tmp_path)


def test_random_states_are_those_of_a_group_or_of_its_replica(tmp_path: Path) -> None:
    """What a rank drew for its weights must not decide its dropout."""
    layout = "tp2:4 @1 | tp2:4 @1"

    def check(rank: int) -> None:
        toy = ToyRank(plan(layout), rank, False, overlap=False)
        parallel_state.fill(toy.groups)
        for of_replicas in (False, True):
            args: Any = SimpleNamespace(
                data_parallel_random_init=of_replicas, seed=5, te_rng_tracker=False,
                inference_rng_tracker=False, cuda_graph_impl="none",
            )  # fmt: skip
            global_vars._GLOBAL_ARGS = args
            torch.manual_seed(rank)
            hooks.random_state_hook(toy.groups)([toy.model])
            found = gathered(torch.rand(3))
            assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
            assert not torch.equal(found[0], found[2])

    in_world(layout, check, tmp_path)


@pytest.mark.parametrize("width", [1, 2])
def test_layers_that_do_not_say_how_they_are_divided_are_refused(width: int) -> None:
    groups: Any = SimpleNamespace(tensor=SimpleNamespace(size=lambda: width))
    made: list[Any] = [unmarked()]
    if width == 1:
        assert hooks.marks_hook(groups)(made) is made
    else:
        with pytest.raises(UnsupportedError, match=r"1\.0\.weight of Gate"):
            hooks.marks_hook(groups)(made)
