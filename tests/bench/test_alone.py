"""A function in a process of its own: what it returns, raises, and how it dies."""

from __future__ import annotations

import os

import pytest

from megatron_hetero.errors import PlanFormatError
from tools.bench.alone import alone


def cores() -> int:
    return len(os.sched_getaffinity(0))


def fail(text: str) -> None:
    raise PlanFormatError(text)


def test_a_result_comes_from_another_process() -> None:
    assert alone(os.getpid) != os.getpid()
    assert alone(cores, one_core=True) == 1
    assert len(os.sched_getaffinity(0)) == alone(cores)


def test_an_error_is_raised_here() -> None:
    with pytest.raises(PlanFormatError, match="no plan"):
        alone(fail, "no plan")


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"\(3,\): its process ended with 3"):
        alone(os._exit, 3)
