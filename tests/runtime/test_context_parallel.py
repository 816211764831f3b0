"""Context parallelism of unlike sizes on the stages of a plan: the same training as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.plan.sharding.token_shares import token_counts
from megatron_hetero.runtime.megatron import context_batch
from megatron_hetero.runtime.parallel.context_place import ContextPlace
from tests.runtime.toy_model import in_world
from tests.runtime.workloads import LATENT, LLAMA_LIKE, plan, workload

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "narrowing": ("tp1cp2:2,tp2:2 @4", {}),
    "widening": ("tp2:2,tp1cp3:2 @4", {"per_token_loss": True}),
    "sequence parallel": (
        "tp2cp2:2,tp4:2 @3",
        {**LLAMA_LIKE, "sequence_parallel": True, "per_token_loss": True},
    ),
    "on both sides": ("tp1cp2:2,tp1cp3:2 @4", {"tied_embeddings": False, "recompute": "full"}),
    "replicas": ("tp1cp2:4 @3 | tp2:1,tp1cp2:3 @3", {"recompute": "selective"}),
    "uneven shares": ("tp2(3:1)cp2(2:1):2,tp1:2 @4 | tp1cp2(1:3):4 @2", {**LLAMA_LIKE}),
    "divided optimizer": ("tp1cp2:2,tp2:2 @4 | tp1:4 @2", {"use_distributed_optimizer": True}),
    "all stages alike": ("tp1cp2:2,tp1cp2:2 @6", {"sequence_parallel": True}),
    "unlike shares, sequence parallel": (
        "tp2cp2(2:1):2,tp1cp3(3:2:1):2 @3",
        {**LLAMA_LIKE, "sequence_parallel": True, "per_token_loss": True},
    ),
    "unlike shares, divided optimizer": (
        "tp1cp2(3:1):2,tp1cp2(1:3):2 @4 | tp1cp2(7:2):4 @2",
        {"use_distributed_optimizer": True, "recompute": "full"},
    ),
    "unlike shares, selective": ("tp2:2,tp1cp2(5:1):2 @6", {"recompute": "selective"}),
    "unlike shares, latent": ("tp1cp2(2:1):2,tp2cp2(1:2):2 @3", {**LATENT}),
    "unlike shares, YaRN": ("tp1cp2(2:1):4 @3", {**LLAMA_LIKE, "position_embedding": "yarn"}),
}
_FAST = {"uneven shares"}
"""Inside replicas and across them; `test_pairs` has even shares and sequence parallelism."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in _FAST)) for n in CASES]
)
def test_a_plan_trains_as_one_process(name: str, tmp_path: Path) -> None:
    layout, changes = CASES[name]
    options = Options(steps=2, optimizers=("adam",) if name in _FAST else ("sgd", "adam"))
    outcome = verify(plan(layout), workload(**changes), options, tmp_path)
    data = outcome_to_data(outcome)
    assert outcome.ok, data
    for run in data["runs"].values():
        # Where a piece lies in the sequence or in the group costs no byte: each crosses once.
        assert {b["bytes_over_least"] for b in run["boundaries"]} <= {1.0}
        assert run["gradient_sync"]["bytes_over_least"] == 1.0


@pytest.mark.slow
def test_equal_shares_are_todays_context_parallelism_bit_for_bit(tmp_path: Path) -> None:
    results = []
    for layout in ("tp1cp2:2,tp2cp2:2 @2", "tp1cp2(3:3):2,tp2cp2(1:1):2 @2"):
        options = Options(steps=2, optimizers=("adam",))
        outcome = verify(plan(layout), workload(**LLAMA_LIKE), options, tmp_path / layout[:9])
        data = outcome_to_data(outcome)
        results.append([data[key] for key in ("loss", "gradients", "gradient_norm", "weights")])
    assert results[0] == results[1]


def test_a_dropped_piece_of_a_boundary_is_seen(tmp_path: Path) -> None:
    options = Options(steps=2, optimizers=("sgd",), fault="boundary-slice-dropped")
    assert not verify(plan("tp1cp2:2,tp2:2 @4"), workload(), options, tmp_path).ok


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_are_those_that_megatron_gives_a_rank(size: int, tmp_path: Path) -> None:
    def check(rank: int) -> None:
        import torch.distributed as dist
        from megatron.core.utils import get_batch_on_this_cp_rank

        # Every sequence of a micro-batch is cut alike, however many there are.
        whole = torch.arange(24).repeat(size, 1)
        batch = get_batch_on_this_cp_rank({"tokens": whole}, False, cp_group=dist.group.WORLD)
        own = ContextPlace((24 // size,) * size, rank).positions()
        assert torch.equal(batch["tokens"], own.repeat(size, 1))

    in_world(f"tp{size}:1 @1", check, tmp_path)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 9))
def test_gathered_pieces_are_put_in_order(shares: list[int], more: int) -> None:
    seq_length = 2 * (len(shares) + more)
    tokens = token_counts(seq_length, tuple(shares))
    places = [ContextPlace(tokens, rank) for rank in range(len(tokens))]
    longest = places[0].most_tokens
    filled = [
        pad(place.positions(), (0, longest - own), value=-1)
        for place, own in zip(places, tokens, strict=True)
    ]
    order = places[0].order_of_gathered()
    assert torch.equal(torch.cat(filled)[order], torch.arange(seq_length))
    for place in places:
        # What one process would attend to, this rank's queries do.
        assert place.seq_length == seq_length and len(place.positions()) == tokens[place.rank]


def test_a_script_gets_the_tokens_of_unlike_shares(tmp_path: Path) -> None:
    """Megatron's own function, which scripts import by name, follows the plan."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = {"tokens": torch.arange(8).unsqueeze(0), "labels": None}
    batch["attention_mask"] = torch.arange(64).view(1, 1, 8, 8)
    context_batch.apply(ContextPlace((6, 2), 1))
    try:
        own = get_batch_on_this_cp_rank(batch, False, cp_group=None)
    finally:
        context_batch.REPLACEMENT.revert()
    assert own["tokens"].tolist() == [[3, 4]] and own["labels"] is None
    assert own["attention_mask"].tolist() == [[[list(range(24, 32)), list(range(32, 40))]]]
