"""Checkpoints from Transformer Engine's layers to local ones and back, and the other way round:
weights, moments and steps bit for bit, under our runtime and stock Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.runtime.transformer_engine.chains import (
    LAST,
    SAVED,
    Chain,
    Part,
    data_of,
    parts,
    train_all,
)
from tests.runtime.transformer_engine.with_layers import LOCAL, TRANSFORMER_ENGINE, call

DEEP = "tp2:3,tp1:1 @4 | tp1:4 @2"
WIDE = "tp1:1,tp2:3 @3 | tp2:2,tp1:2 @3"
STOCK = "tp2:4 @3 | tp2:4 @3"
DIVIDED, FORM = "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"

CHAINS = (
    Chain("whole", TRANSFORMER_ENGINE, DEEP, WIDE),
    Chain("divided in bf16", TRANSFORMER_ENGINE, DEEP, WIDE, (DIVIDED,), (DIVIDED,), ("--bf16",)),
    Chain("stock", TRANSFORMER_ENGINE, STOCK, DEEP),
    Chain("local whole", LOCAL, WIDE, DEEP),
    Chain("local stock", LOCAL, STOCK, STOCK),
)
MORE = (
    Chain("in stock's form", TRANSFORMER_ENGINE, STOCK, DEEP, (DIVIDED, FORM), (DIVIDED, FORM)),
    Chain("local divided in bf16", LOCAL, WIDE, DEEP, (DIVIDED,), (), ("--bf16",)),
    Chain("local in stock's form", LOCAL, DEEP, STOCK, (DIVIDED, FORM), (DIVIDED, FORM)),
)


def train(chains: Sequence[Chain], folder: Path) -> None:
    """Train all chains in four processes, two of each kind of layers, in turn."""
    of_engine = [parts(c) for c in chains if c.layers == TRANSFORMER_ENGINE]
    of_local = [parts(c) for c in chains if c.layers == LOCAL]
    turns: list[tuple[str, list[Part]]] = [
        (TRANSFORMER_ENGINE, [p[n] for p in of_engine for n in ("first", "straight")]),
        (
            LOCAL,
            [p["between"] for p in of_engine]
            + [p[n] for p in of_local for n in ("first", "straight")],
        ),
        (TRANSFORMER_ENGINE, [p["back"] for p in of_engine] + [p["between"] for p in of_local]),
        (LOCAL, [p["back"] for p in of_local]),
    ]
    for layers, given in turns:
        call(layers, train_all, str(folder), [data_of(part) for part in given])


def tensors(folder: Path, chain: Chain, part: str, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments, by one key for both forms of the optimizer's state."""
    from tests.runtime.runs import checkpoint_tensors

    saved = folder / chain.name.replace(" ", "-") / part / "saved" / f"iter_{step:07}"
    found = {
        key.replace("fp32_param.", "param."): value
        for key, value in checkpoint_tensors(saved).items()
        if not key.startswith("rng_state") and "random" not in key
    }
    return dict(entry for key, value in found.items() for entry in _of_layers(key, value))


def _of_layers(key: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor of each layer, of which stock Megatron has all in one."""
    before, layers, after = key.partition("decoder.layers.")
    if not layers or after[0].isdigit():
        yield key, value
        return
    for number, of_layer in enumerate(value):
        yield f"{before}{layers}{number}.{after}", of_layer


def assert_alike(chain: Chain, folder: Path) -> None:
    first = tensors(folder, chain, "first", SAVED)
    moments = [key for key in first if ".exp_avg." in key]
    assert len(moments) > 10 and all(first[key].any() for key in moments)
    for step, one, other in (
        (SAVED, first, tensors(folder, chain, "between", SAVED)),
        (LAST, tensors(folder, chain, "straight", LAST), tensors(folder, chain, "back", LAST)),
    ):
        shared = set(one) & set(other)
        assert {key for key in one if "fp32_from" not in key and ".param." not in key} <= shared
        unlike = [key for key in shared if not torch.equal(one[key], other[key])]
        assert not unlike, (step, unlike[:3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chains")
    train(CHAINS[:1], made)
    return made


def test_there_and_back(folder: Path) -> None:
    assert_alike(CHAINS[0], folder)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("more")
    train((*CHAINS[1:], *MORE), made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("chain", [*CHAINS[1:], *MORE], ids=lambda chain: chain.name)
def test_more_there_and_back(chain: Chain, more: Path) -> None:
    assert_alike(chain, more)
