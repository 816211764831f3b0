"""Forms of programs that the runtime executes: told apart, named as stages, and what lacks in
others."""

from __future__ import annotations

from random import Random

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.referees.hap.random_programs import random_program
from tools.referees.hap.costed import LayerGroup, layer_prices
from tools.referees.hap.forms import (
    CONTEXT,
    REPLICAS,
    SHARDED,
    TENSOR,
    TENSOR_AND_SEQUENCE,
    RuntimeForm,
    form_of,
    lacks,
    runtime_forms,
    whole_shares,
)
from tools.referees.hap.layer import TOGETHER
from tools.referees.hap.prices import program_bytes
from tools.referees.hap.synthesise import synthesise

CLUSTER = make_cluster(("a", FAST, 1), ("b", SLOW, 1), between=Link(25e9, 5e-6))
GROUP = LayerGroup(CLUSTER.devices, 8, 1, 16, (1e12, 1e12))
COSTS = CostModel(
    CLUSTER,
    make_workload(8, 2048, seq_length=2048, use_distributed_optimizer=True),
)


def test_whole_shares_keep_to_the_shares() -> None:
    rng = Random(0)
    for _ in range(100):
        parts = [rng.uniform(0.05, 1) for _ in range(rng.randint(1, 6))]
        shares = tuple(part / sum(parts) for part in parts)
        whole = whole_shares(shares)
        assert min(whole) >= 1
        for own, share in zip(whole, shares, strict=True):
            assert own / sum(whole) == pytest.approx(share, abs=1 / 64)


@pytest.mark.parametrize(
    "form",
    [TENSOR, TENSOR_AND_SEQUENCE, CONTEXT, REPLICAS, SHARDED],
    ids=lambda form: f"{form.name}, {form.boundary}",
)
def test_forms_are_told_apart(form: RuntimeForm) -> None:
    """The fastest program that a form allows is recognised as of this form."""
    prices = layer_prices(COSTS, GROUP, form.along)
    found = synthesise(prices, form.allows)
    assert found is not None
    assert form_of(prices, found.program) == form
    assert lacks(prices, found.program) == ()
    assert len(program_bytes(found.program, prices, found.shares)) == 2


def test_a_program_has_a_form_or_lacks_something() -> None:
    """Of random programs; whatever sends tokens for heads, or mixes divisions, is not executed."""
    prices = layer_prices(COSTS, GROUP, TOGETHER)
    num_of_none = 0
    for seed in range(30):
        allows = None if seed % 3 else CONTEXT.allows
        program = random_program(prices.graph, Random(seed), allows)
        form = form_of(prices, program)
        assert (form is None) == bool(lacks(prices, program))
        divisions = {one.state for one in program if one.kind == "compute"}
        sends = any(one.kind == "all-to-all" for one in program)
        if sends or divisions >= {"tokens", "columns"}:
            assert form in (None, TENSOR_AND_SEQUENCE)
            assert not sends or any("all-to-all of" in words for words in lacks(prices, program))
        num_of_none += form is None
    assert 10 <= num_of_none < 30


def test_a_form_is_written_as_a_stage_of_a_layout() -> None:
    even, uneven = (0.5, 0.5), (0.75, 0.25)
    assert TENSOR.stage({"columns": even}) == TENSOR_AND_SEQUENCE.stage({"columns": even}) == "tp2"
    assert TENSOR.stage({"columns": uneven, "tokens": even}) == "tp2(3:1)"
    assert CONTEXT.stage({"columns": even, "tokens": uneven}) == "tp1cp2(3:1)"
    # Sixty-fourths do not divide into thirds, and GPUs alike have parts alike.
    assert CONTEXT.stage({"tokens": (1 / 3, 1 / 3, 1 / 3)}) == "tp1cp3"
    for form in (REPLICAS, SHARDED):
        assert form.stage({"sequences": uneven}) is None


def test_flags_of_the_job_choose_the_forms() -> None:
    assert runtime_forms(False, False) == (TENSOR, CONTEXT, REPLICAS)
    assert runtime_forms(True, True) == (TENSOR_AND_SEQUENCE, CONTEXT, REPLICAS, SHARDED)
