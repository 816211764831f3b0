"""Numbers that only the log has: losses of balance and of further tokens."""

from __future__ import annotations

import pytest

from megatron_hetero.lab.verify.distance.log import first_unlike_entry, printed_steps

LINE = (
    " [2026-11-27 06:00:00.000000] iteration        {step}/       5 | consumed samples:  {n} | "
    "elapsed time per iteration (ms): {ms} | learning rate: 3.000000E-04 | global batch size:     "
    "6 | lm loss: {loss} | load_balancing_loss: 1.000000E+00 | mtp_1 loss: {mtp} | loss scale: 1.0 "
    "| grad norm: 2.410 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def line(step: int, ms: float = 10.0, loss: str = "5.5E+00", mtp: str = "5.7E+00") -> str:
    return LINE.format(step=step, n=6 * step, ms=ms, loss=loss, mtp=mtp)


def test_all_entries_but_times_are_read() -> None:
    (entries,) = printed_steps("noise\n" + line(1)).values()
    assert set(entries) == {
        "consumed samples", "learning rate", "global batch size", "lm loss", "load_balancing_loss",
        "mtp_1 loss", "loss scale", "grad norm", "number of skipped iterations",
        "number of nan iterations",
    }  # fmt: skip


def test_times_may_differ() -> None:
    assert first_unlike_entry(line(1), line(1, ms=99), 1e-6) is None


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (line(1, mtp="5.70002E+00"), "mtp_1 loss 5.70002 in step 1, in the one process 5.7"),
        (line(1, loss="nan"), "lm loss nan in step 1"),
        (line(2), "steps [2] are printed"),
        (line(1).replace("mtp_1", "mtp_2"), "'mtp_1 loss' of step 1 is printed by one"),
    ],
)
def test_what_differs_is_named(other: str, found: str) -> None:
    assert str(first_unlike_entry(line(1), other, 1e-6)).startswith(found)


def test_logs_without_steps_are_no_agreement() -> None:
    assert "no line of a step" in str(first_unlike_entry("noise\n", "noise\n", 1e-6))


def test_losses_that_megatron_prints_as_means_are_left_to_the_record() -> None:
    one, plan = line(1) + line(2), line(1) + line(2, loss="5.6E+00")
    assert "lm loss 5.6 in step 2" in str(first_unlike_entry(one, plan, 1e-6))
    assert first_unlike_entry(one, plan, 1e-6, averaged=(2,)) is None
    worse = plan.replace("grad norm: 2.410", "grad norm: 2.510")
    assert "grad norm" in str(first_unlike_entry(one, worse, 1e-6, averaged=(2,)))
