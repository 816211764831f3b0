"""The check can fail: each planted error is caught, and by what it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.verify.faults.catalogue import FAULTS, check_fault
from tests.lab.verify.faults.jobs import BROKEN, FEATURES, find, planted

FAST = (
    ("boundary-rounded", "sgd"),
    ("weights-not-gathered", "sgd"),
    ("samples-shifted", "adam"),
    ("random-number-drawn-alone", "adam"),
    ("unequal-starts", "sgd"),
)
"""So few that every comparison has found something; all with both optimizers are slow."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process trains once for all errors, which are planted in the plan's runs."""
    return tmp_path_factory.mktemp("shared")


def test_every_fault_is_tried() -> None:
    assert set(BROKEN) | set(FEATURES) == set(FAULTS)
    fast = set().union(*(BROKEN[fault] for fault, _ in FAST))
    assert fast == set().union(*BROKEN.values())


@pytest.mark.parametrize(
    ("fault", "optimizer"),
    [
        pytest.param(f, o, marks=[] if (f, o) in FAST else [pytest.mark.slow])
        for f in BROKEN
        for o in planted(f).optimizers
    ],
)
def test_a_planted_error_is_caught(
    fault: str, optimizer: str, shared: Path, tmp_path: Path
) -> None:
    error = planted(fault)
    folder = tmp_path if error.megatron_args else shared
    assert error.due_with(optimizer) <= find(error, folder, optimizer, reuses=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FEATURES)
def test_an_error_of_a_feature_is_caught_with_adam_alone(fault: str, tmp_path: Path) -> None:
    error = planted(fault)
    assert error.due <= find(error, tmp_path, "adam")


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of boundary-slice-dropped"):
        check_fault("nothing")
