"""What surrounds a step: validation, the count of tokens and the end of the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.runtime.steps.executor import Executor
from megatron_hetero.schedule.of_plan import replica_schedule
from tests.runtime.steps.small_pipeline import TOKENS, SmallRank, losses
from tests.runtime.toy_model import in_world
from tests.runtime.workloads import plan

LAYOUT = "tp1:1,tp1:1 @4"


def executor_of(own: SmallRank, watched: Any = None) -> Executor:
    return Executor(replica_schedule(plan(LAYOUT), 0), own.stage, watched)


def test_validation_runs_the_forwards_alone(tmp_path: Path) -> None:
    """No gradient is made, none is finished, and training goes on behind it as before."""

    def check(rank: int) -> None:
        own = SmallRank(plan(LAYOUT), rank)
        seen: list[str] = []

        @contextmanager
        def watched(kind: str) -> Iterator[None]:
            seen.append(kind)
            yield

        def never(*given: Any, **named: Any) -> None:
            raise AssertionError("gradients of validation")

        own.config.finalize_model_grads_func = never
        executor = executor_of(own, watched)
        for _ in range(2):
            seen.clear()
            reports = own.step(executor, 4, forward_only=True)
            crossing = "send_forward" if own.stage == 0 else "recv_forward"
            assert sorted(seen) == ["forward"] * 4 + [crossing] * 4
            expected = losses(2, 4) if own.stage == 1 else []
            assert [float(r["loss"]) for r in reports] == pytest.approx(expected)
            assert not own.model.weight.main_grad.any()
        own.config.finalize_model_grads_func = None
        own.step(executor, 4)
        assert own.model.weight.main_grad.any() and seen.count("backward") == 4

    in_world(LAYOUT, check, tmp_path)


@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_are_finished_once_with_the_tokens_of_the_last_stage(
    per_token: bool, tmp_path: Path
) -> None:
    def check(rank: int) -> None:
        own = SmallRank(plan(LAYOUT), rank)
        own.config.calculate_per_token_loss = per_token
        calls: list[Any] = []

        def finish(chunks: Any, tokens: Any, **named: Any) -> None:
            assert chunks == [own.model] and own.model.weight.main_grad.any()
            calls.append((None if tokens is None else int(tokens), named["force_all_reduce"]))

        own.config.finalize_model_grads_func = finish
        own.step(executor_of(own), 4, force_all_reduce=True)
        counted = 4 * TOKENS if own.stage == 1 else 0
        assert calls == [(counted if per_token else None, True)]

    in_world(LAYOUT, check, tmp_path)


def test_models_of_several_streams_are_refused(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        own = SmallRank(plan(LAYOUT), rank)
        with pytest.raises(ValueError, match="several streams"):
            own.step(executor_of(own), 4, adjust_tensor_shapes_fn=print)

    in_world(LAYOUT, check, tmp_path)
