"""Replicas of unlike widths and shares answer as one process of stock Megatron without a cache: the
same tokens, greedy and seeded, and the same logits.

How close fp32 can be is a matter of rounding: sums over unlike shares have other orders, and logits
of about 5 come out up to 1.9e-5 apart, 1e-5 of the largest.  In double precision the same layouts
are within 1e-10: what is left in fp32 is rounding, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_hetero.lab.serve.rank import ServeOptions, plan_of_layout
from tests.lab.serve.replicas import argv_of, make_checkpoint, reference, run_replica

FAST = (
    ("gqa", "tp2:3,tp1:1"),
    ("gqa", "tp1:1,tp2(3:1):3"),
    ("experts", "tp1:1,tp2:3"),
)
SLOW = (
    ("gqa", "tp1:3,tp2:1"),
    ("gqa", "tp4:1,tp2:3"),
    ("gqa", "tp4:2,tp1:2"),
    ("gqa", "tp2:1,tp4:3"),
    ("gqa", "tp1:1,tp2:2,tp1:1"),
    ("gqa", "tp3(2:1:1):2,tp1:2"),
    ("gqa", "tp2(3:1):2,tp4:2"),
    ("gqa", "tp1:1,tp1:2,tp2:1"),
    ("gqa", "tp3(1:2:1):1,tp2(1:3):3"),
    ("learned", "tp2:3,tp1:1"),
    ("learned", "tp1:2,tp4:2"),
    ("learned", "tp3(2:1:1):1,tp2:3"),
    ("learned", "tp2(1:3):3,tp1:1"),
    ("learned", "tp1:1,tp2:1,tp1:2"),
    ("experts", "tp2:3,tp1:1"),
    ("experts", "tp4:2,tp2:2"),
    ("experts", "tp1:2,tp4:2"),
    ("experts", "tp2(3:1):2,tp1:2"),
    ("experts", "tp1:1,tp2:2,tp1:1"),
    ("experts", "tp2ep2:2,tp1:2"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.mark.parametrize(
    ("model", "layout"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_layout_answers_as_one_process(
    model: str,
    layout: str,
    tmp_path: Path,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = _checkpoint(model, folders, tmp_path_factory)
    _, relative = _difference(model, layout, folder, tmp_path)
    assert relative <= 1e-5


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gqa", "tp1:1,tp2(3:1):3"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gqa", "tp3(1:2:1):1,tp2(1:3):3"),
                ("learned", "tp1:2,tp4:2"),
                ("experts", "tp1:1,tp2:3"),
                ("experts", "tp2ep2:2,tp1:2"),
            )
        ),
    ],
)
def test_in_double_precision_only_the_order_of_sums_is_left(
    model: str,
    layout: str,
    tmp_path: Path,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = _checkpoint(model, folders, tmp_path_factory)
    difference, _ = _difference(model, layout, folder, tmp_path, in_double=True)
    assert difference <= 1e-10


def _checkpoint(
    model: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if model not in folders:
        folders[model] = tmp_path_factory.mktemp(model)
        make_checkpoint(model, folders[model])
    return folders[model]


def _difference(
    model: str, layout: str, folder: Path, tmp_path: Path, in_double: bool = False
) -> tuple[float, float]:
    """Return the largest difference of a logit, and the largest in an answer over the answer's
    largest logit; tokens are compared."""
    num_ranks = plan_of_layout(layout).layout.num_devices
    options = ServeOptions(kv_tokens=128, max_sequences=4, step_tokens=12)
    argv = argv_of(model, layout, folder / "checkpoint")
    answers = run_replica(argv, num_ranks, tmp_path, options, in_double=in_double)
    differences, relative = [], []
    for answer, wanted in zip(answers, reference(folder, in_double), strict=True):
        assert answer["tokens"] == wanted["tokens"]
        assert answer["ended"] == "length"
        found, exact = np.array(answer["logits"]), np.array(wanted["logits"])
        differences.append(np.abs(found - exact).max())
        relative.append(differences[-1] / np.abs(exact).max())
    return float(max(differences)), float(max(relative))
