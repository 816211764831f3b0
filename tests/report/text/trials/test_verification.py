"""What `verify` found, on a terminal."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from megatron_hetero.report.text.trials.verification import verification_report

RUN: dict[str, Any] = {
    "loss": 2e-8,
    "gradients": 3.7e-7,
    "gradient_norm": 1e-7,
    "weights": 2.6e-7,
    "tolerance": {"loss": 1e-6, "gradients": 5e-6, "gradient_norm": 2e-6, "weights": 5e-6},
    "ok": True,
    "same_samples": True,
    "same_norm_bits_on_all_ranks": True,
    "same_random_states_in_groups": True,
    "own_random_states_of_regions": True,
    "same_loss_scales": True,
    "same_initial_weights": True,
    "unequal_initial_weights": None,
    "unlike_distribution_of_initial_weights": None,
    "unequal_holders": None,
    "unlike_log": None,
    "later_gradients": {"found": 2e-6, "allowed": 1e-3, "where": "decoder.layers.0.mlp"},
    "worst": {
        "loss": "step 1", "gradients": "decoder.layers.0.mlp, step 2",
        "gradient_norm": "step 1", "weights": "decoder.layers.1.mlp",
    },
    "left_out_of_weights": ["a.bias", "b.bias"],
    "losses": [{"one_process": 5.25, "plan": 5.2500001}, {"one_process": 5.0, "plan": 5.0}],
    "floor": None,
    "gradient_sync": {
        "most_collectives_per_step": 5.0, "bytes": 2048, "least_bytes": 2048,
        "bytes_over_least": 1.0, "copied_share": 0.25,
    },
    "boundaries": [
        {"replica": 0, "boundary": 0, "from_stage": stage, "messages": 4, "bytes": 4096,
         "least_bytes": 4096, "bytes_over_least": 1.0}
        for stage in (0, 1)
    ],
}  # fmt: skip
DATA: dict[str, Any] = {
    **{key: RUN[key] for key in ("loss", "gradients", "gradient_norm", "weights", "tolerance")},
    "ok": True,
    "layout": "tp2:1,tp1:1 @2 | tp1:2 @1",
    "layers": "Megatron's local ones (the job names them)",
    "shrunk": ["hidden_size 4096 -> 32", "seq_length 2048 -> 32"],
    "flags": {
        "kept": ["--clip-grad 0.5"],
        "added": ["--eod-mask-loss"],
        "no_effect": {"checkpoints": ["--save", "--load"]},
        "left_out": [],
    },
    "runs": {"sgd": RUN},
}


def printed(data: dict[str, Any], width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, markup=False, highlight=False)
    console.print(verification_report(data))
    return stream.getvalue()


def changed(**of_the_run: Any) -> dict[str, Any]:
    data = copy.deepcopy(DATA)
    data["runs"]["sgd"] |= of_the_run
    return data


@pytest.mark.parametrize(
    "fact",
    [
        "4 processes on this plan beside one process of stock Megatron",
        "tp2:1,tp1:1 @2 | tp1:2 @1",
        "shrunk to fit: hidden_size 4096 -> 32, seq_length 2048 -> 32",
        "kept          --clip-grad 0.5",
        "added         --eod-mask-loss",
        "no effect     --save, --load (checkpoints)",
        "Training with SGD",
        "every step took the same samples",
        "gradient sync: up to 5 collectives a step, 1.00x the least bytes, 25% copied",
        "boundaries: 8 tensors of 8 KiB in all, handed over 1.00x",
        "same bits on all ranks",
        "the key biases of 2 layers",
        "The plan trains as one process does.",
    ],
)
def test_every_fact_is_printed(fact: str) -> None:
    assert fact in printed(DATA, width=100)


def test_losses_and_distances() -> None:
    rows = [line.split() for line in printed(DATA).splitlines()]
    assert ["1", "5.2500000", "5.2500001", "1.0e-07"] in rows
    assert ["gradients", "3.7e-07", "5e-06", "ok"] in rows
    assert ["gradient", "norm", "1.0e-07", "2e-06", "ok"] in rows


def test_the_floor_is_a_column_of_its_own() -> None:
    floor = {"loss": 1e-8, "gradients": 1.1e-7, "gradient_norm": 1e-8, "weights": 1e-8}
    text = printed(changed(floor=floor))
    assert "rounding floor" in text
    assert ["gradients", "3.7e-07", "5e-06", "1.1e-07", "ok"] in [
        line.split() for line in text.splitlines()
    ]


def test_a_row_in_which_rounding_hides_all_says_so() -> None:
    floor = {"loss": 1e-8, "gradients": 1e-7, "gradient_norm": 1e-8, "weights": 2.4e3}
    text = printed(changed(floor=floor), width=120)
    assert text.count("checks little: rounding alone is this far") == 1
    (line,) = [line for line in text.splitlines() if "checks little" in line]
    assert "weights" in line and "2.4e+03" in line


@pytest.mark.parametrize("found", [6e-6, float("nan"), float("inf")])
def test_what_is_too_far_apart_says_where(found: float) -> None:
    text = printed(changed(gradients=found, ok=False), width=100)
    assert "NO at decoder.layers.0.mlp, step 2" in text


def test_failed_checks_say_no() -> None:
    wrong = changed(
        same_samples=False,
        same_norm_bits_on_all_ranks=False,
        same_random_states_in_groups=False,
        own_random_states_of_regions=False,
        same_initial_weights=False,
        unequal_initial_weights="a.weight, rank 2",
    )
    text = printed(wrong | {"ok": False})
    assert "NO: ranks of a tensor-parallel group ended with unlike random states" in text
    assert "NO: ranks of a tensor-parallel group would drop alike what they divide" in text
    assert "NO: the steps did not take the same samples" in text
    assert "NO: the gradient norm differs between ranks" in text
    assert "NO: unlike initial weights: a.weight, rank 2" in text
    assert text.endswith("The plan does NOT train as one process does.\n")


def test_what_is_left_out_is_in_the_verdict() -> None:
    data = copy.deepcopy(DATA)
    data["flags"]["left_out"] = [{"flag": "--fp8-format hybrid", "reason": "needs a GPU"}]
    text = printed(data, width=100)
    assert "left out      --fp8-format hybrid: needs a GPU" in text
    assert "equal, but for --fp8-format hybrid, left out here." in text
    assert "equal" not in printed(data | {"ok": False}).splitlines()[-1]


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_terminal(width: int) -> None:
    assert max(map(len, printed(DATA, width).splitlines())) <= width


def test_adam_says_what_its_rows_compare() -> None:
    data = copy.deepcopy(DATA)
    assert "before any weight moved" not in printed(data, 100)
    data["runs"] = {"adam": copy.deepcopy(RUN)}
    assert "before any weight moved" in printed(data, 100)
    assert "nothing is left" not in printed(data, 100)
    data["runs"]["adam"]["weights"] = 0.0
    assert "0.0: nothing is left, even where losses differ" in " ".join(printed(data, 100).split())
