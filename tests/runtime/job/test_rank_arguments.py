"""What Megatron's parser sees on each rank."""

from __future__ import annotations

import os
import sys

import pytest

from megatron_hetero.plan.ranks import positions
from megatron_hetero.runtime.job.rank_arguments import rank_arguments, virtual_world
from tests.runtime.workloads import plan

LAYOUT = "tp2:3,tp1:1 @4 | tp3:4 @2"


def test_every_rank_pads_the_vocabulary_alike() -> None:
    """Megatron pads to the divisor times the width; all ranks must get one number."""
    asked = plan(LAYOUT)
    for given, divisor in (((), 128), (("--make-vocab-size-divisible-by", "10"), 10)):
        products = set()
        for position in positions(asked.layout):
            argv = rank_arguments(asked, position, given)
            width = asked.replicas[position.replica].stages[position.stage].shape.tensor_parallel
            last = [a for a in argv if a.startswith("--make-vocab-size-divisible-by=")][-1]
            products.add(int(last.partition("=")[2]) * width)
        assert products == {divisor * 6}


def test_a_rank_parses_as_if_its_replica_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plan(LAYOUT)
    position = positions(asked.layout)[2]
    argv = rank_arguments(asked, position, ("--bf16",))
    assert "--tensor-model-parallel-size=1" in argv
    assert "--pipeline-model-parallel-size=2" in argv
    assert "--pipeline-model-parallel-layout=Ettt|tL" in argv
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "6")
    before = sys.argv
    with virtual_world(asked, position, argv):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
        assert sys.argv[1:] == list(argv)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "6")
    assert sys.argv is before
