"""Objects that are made quickly, and objects that remember their hash."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import pytest

from megatron_hetero.hashed import hashed_once, value


class Counted:
    """Equal to all of its kind; counts how often it is hashed."""

    num_hashed = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted)

    def __hash__(self) -> int:
        Counted.num_hashed += 1
        return 7


@hashed_once
@dataclass(frozen=True)
class Pair:
    """Two things."""

    one: Counted
    other: int


def test_the_hash_is_that_of_the_fields_and_is_computed_once() -> None:
    pair = Pair(Counted(), 3)
    before = Counted.num_hashed
    assert hash(pair) == hash(pair) == hash((Counted(), 3))
    assert Counted.num_hashed == before + 2  # once for the pair, once for the tuple
    assert {pair: "found"}[Pair(Counted(), 3)] == "found"


def test_a_changed_copy_and_one_of_another_process_have_hashes_of_their_own() -> None:
    pair = Pair(Counted(), 3)
    assert hash(replace(pair, other=4)) != hash(pair)
    assert "_hash" not in pickle.loads(pickle.dumps(pair)).__dict__


@value(frozen=True, slots=True)
class Point:
    """A place."""

    x: int
    y: int = 0


@value(frozen=True, eq=False)
class Token:
    """Equal to itself alone."""

    name: str


@pytest.mark.parametrize("given", [(1, 2), (1, 0)])
def test_values_compare_and_hash_as_their_fields_do(given: tuple[int, int]) -> None:
    point = Point(*given)
    assert point == Point(*given) != replace(point, x=9)
    assert hash(point) == hash(Point(*given)) == hash(given)
    assert not hasattr(point, "__dict__")


def test_values_without_equality_are_told_apart_by_identity() -> None:
    one, other = Token("a"), Token("a")
    assert one != other
    assert len({one, other, one}) == 2
