"""Generated plans with every pair of features, each equal to one process of stock Megatron.

The first few, which have every value of every feature, are part of the default tests, all of them
of `make test-pairs`;
`tools/prove_plans.py` draws as many as one likes.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations, islice
from pathlib import Path

import pytest

from megatron_hetero.plan.layout import format_layout
from tests.runtime.all_pairs import Exclusion, Space
from tests.runtime.plan_features import FACTORS, SPACE
from tests.runtime.plan_generator import Case, cases
from tests.runtime.prove import prove

SEED = 20
NUM_CASES = 60
NUM_DEFAULT = 5


@cache
def generated() -> tuple[Case, ...]:
    return tuple(islice(cases(SEED), NUM_CASES))


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] * (n >= NUM_DEFAULT)) for n in range(NUM_CASES)],
)
def test_a_generated_plan_trains_as_one_process(number: int, tmp_path: Path) -> None:
    proof = prove(generated()[number], tmp_path)
    assert proof.ok, str(proof)


@pytest.mark.slow
def test_the_small_rest_of_a_large_sum_is_held_to_the_rounding_of_the_sum(tmp_path: Path) -> None:
    """A query norm's bias whose gradient is 4e-5 where those of other layers are 4e-4."""
    case = next(islice(cases(1), 24, None))
    proof = prove(case, tmp_path)
    assert proof.ok and proof.is_against_floor, str(proof)


def test_what_resumes_experts_trains_them() -> None:
    """A second plan is drawn freely, but for what is refused with the model of the first."""
    for case in generated():
        if case.second is not None and case.values["MLP"] == "experts":
            assert not case.second.layout.has_context_parallel
            assert {r.micro_batch_size for r in case.second.replicas} == {None}


def test_the_cases_contain_every_pair_that_is_possible() -> None:
    covered = {pair for case in generated() for pair in SPACE.pairs_of(case.values)}
    assert SPACE.allowed_pairs() - covered == set()


def test_a_third_of_the_cases_has_uneven_shares() -> None:
    uneven = [
        c for c in generated() if any(s.shares for r in c.plan.layout.replicas for s in r.stages)
    ]
    assert len(uneven) * 3 >= NUM_CASES
    assert len({format_layout(case.plan.layout) for case in generated()}) >= NUM_CASES * 0.9


def test_the_same_seed_gives_the_same_cases() -> None:
    assert list(islice(cases(3), 4)) == list(islice(cases(3), 4))
    assert list(islice(cases(3), 4)) != list(islice(cases(4), 4))


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(5)]
)
def test_the_values_of_a_case_are_in_its_plan(seed: int) -> None:
    """The features that a case claims to cover are those that it trains."""
    for case in islice(cases(seed), 20):
        stages = [s for r in case.plan.replicas for s in r.stages]
        widths = [s.shape.tensor_parallel for s in stages]
        depths = [len(r.stages) for r in case.plan.replicas]
        counts = {r.num_micro_batches for r in case.plan.replicas}
        sizes = {r.micro_batch_size for r in case.plan.replicas}
        found = {
            "replicas": str(len(case.plan.replicas)),
            "stages": str(max(depths)),
            "depths": "equal" if len(set(depths)) == 1 else "unlike",
            "widest": str(max(widths)),
            "widths": "one" if len(set(widths)) == 1 else "mixed",
            "context parallel": "on" if case.plan.layout.has_context_parallel else "off",
            "shares": "uneven" if any(s.shape.shares for s in stages) else "even",
            "micro-batches": "equal" if len(counts) == 1 else "unlike",
            "recompute": (
                "of each stage" if any(s.recompute for s in stages) else case.values["recompute"]
            ),
        }
        assert found.items() <= case.values.items()
        assert (len(sizes) > 1) == (case.values["micro-batch size"] == "of each replica")
        launched = any(s.num_launched_forwards is not None for s in stages)
        assert launched == (case.values["schedule"] in ("ahead", "one at a time"))
        assert any(s.chunks for s in stages) == (case.values["schedule"] == "interleaved")
        split = any("I" in (s.order or "") for s in stages)
        assert split == (case.values["schedule"] == "zero bubble")
        assert (case.second is None) == (case.values["resume"] == "no")


def test_the_default_cases_have_every_value_of_every_feature() -> None:
    for name, values in FACTORS.items():
        assert {case.values[name] for case in generated()[:NUM_DEFAULT]} == set(values), name


def test_pairs_are_covered_by_far_fewer_cases_than_there_are() -> None:
    factors = {f"f{i}": ("a", "b", "c") for i in range(6)}
    space = Space(factors, [Exclusion(("f0", "a"), ("f1", "a"), "a test")])
    chosen = list(islice(space.select(random.Random(0), lambda number: {}, lambda case: True), 20))
    assert space.allowed_pairs() == {pair for case in chosen for pair in space.pairs_of(case)}
    assert not any(case["f0"] == case["f1"] == "a" for case in chosen)
    assert len(space.allowed_pairs()) == 9 * len(list(combinations(factors, 2))) - 1


def test_an_exclusion_of_an_unknown_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="stages has no value '9'"):
        Space(FACTORS, [Exclusion(("stages", "9"), ("replicas", "1"), "a test")])
