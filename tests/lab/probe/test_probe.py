"""The probe on this CPU: pieces of a real Megatron model, and a profile that plans can use."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.profile import PIECES, load_profile
from megatron_hetero.errors import CheckFailedError, UsageError
from megatron_hetero.lab.probe import command
from megatron_hetero.lab.probe.command import ProbeRequest, megatron_flags, probe
from megatron_hetero.model.load import load_workload
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs

FLAGS = (
    "--num-layers=8",
    "--hidden-size=64",
    "--num-attention-heads=4",
    "--seq-length=32",
    "--max-position-embeddings=32",
    "--vocab-size=500",
    "--micro-batch-size=2",
    "--global-batch-size=8",
    "--save=checkpoints",
    "--data-path=somewhere",
    "--swiglu",
)


def request(tmp_path: Path, **changes: Any) -> ProbeRequest:
    given: dict[str, Any] = {
        "workload": load_workload(None, FLAGS),
        "gpu": "CPU",
        "widths": (1,),
        "micro_batch_sizes": (1, 2),
        "num_layers": 2,
        "seconds": 0.2,
        "output": tmp_path / "profile.json",
    }
    return ProbeRequest(**(given | changes))


def result_of(*sizes: int, forward_s: float = 0.5) -> dict[str, Any]:
    """Return the result that a rank would write."""
    pieces = [
        {"piece": piece, "micro_batch_size": size, "forward_s": forward_s, "backward_s": 1.0,
         "num_repeats": 5, "spread": 0.1}
        for size in sizes
        for piece in PIECES
    ]  # fmt: skip
    return {"pieces": pieces, "too_large": []}


@pytest.mark.parametrize("recompute", [(), ("--recompute-granularity=full",
                                            "--recompute-method=uniform",
                                            "--recompute-num-layers=1")])  # fmt: skip
def test_pieces_of_a_real_model_are_measured(tmp_path: Path, recompute: tuple[str, ...]) -> None:
    """Every piece of every size, and with recompute the layer's backward pass repeats its
    forward."""
    asked = request(tmp_path, workload=load_workload(None, (*FLAGS, *recompute)))
    argv = megatron_flags(asked, 1)

    def rank_main(rank: int) -> None:
        from megatron.core.tensor_parallel import random

        from megatron_hetero.lab.probe.pieces import PieceProbe, ProbeDoneError
        from megatron_hetero.runtime.job import entry

        repeated = []
        backward = random.CheckpointFunction.backward

        def counted(*arguments: Any) -> Any:
            repeated.append(True)
            return backward(*arguments)

        random.CheckpointFunction.backward = staticmethod(counted)
        try:
            entry.main(argv, observer=PieceProbe((1, 8), 0.3))
        except ProbeDoneError as done:
            data = {"pieces": [asdict(p) for p in done.result], "num_repeated": len(repeated)}
            (tmp_path / "found.json").write_text(json.dumps(data))

    run_jobs([LocalJob("probe", 1, rank_main, tmp_path)], timeout_s=100.0)
    data = json.loads((tmp_path / "found.json").read_text())
    found = data["pieces"]
    assert [(p["piece"], p["micro_batch_size"]) for p in found] == [
        (piece, size) for size in (1, 8) for piece in PIECES
    ]
    assert all(p["forward_s"] > 0 and p["backward_s"] > 0 for p in found)
    assert all(p["num_repeats"] >= 5 for p in found)
    num_passes = sum(p["num_repeats"] for p in found if p["piece"] == "decoder_layer")
    if recompute:
        assert data["num_repeated"] >= 2 * num_passes > 0, "both layers in every pass"
    else:
        assert data["num_repeated"] == 0


def test_flags_that_touch_files_are_left_out(tmp_path: Path) -> None:
    flags = megatron_flags(request(tmp_path), 2)
    assert not any("checkpoints" in flag or "somewhere" in flag for flag in flags)
    assert "--swiglu" in flags
    assert "--tensor-model-parallel-size=2" in flags
    assert "--num-layers=2" in flags
    assert "--global-batch-size=2" in flags
    # A group that has measured leaves; the job's watch would end those that still measure.
    assert "--hetero-stall-limit=0" in flags


def test_all_gpus_of_a_machine_are_busy_in_groups_of_the_width(tmp_path: Path) -> None:
    asked = request(tmp_path, num_busy=8)
    assert [asked.num_ranks(width) for width in (1, 2, 3, 8)] == [8, 8, 6, 8]
    assert "--global-batch-size=8" in megatron_flags(asked, 2), "of the larger micro-batch, 4 times"
    assert request(tmp_path).num_ranks(2) == 2


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, tuple[int, ...]]] = []

    def launch(asked: ProbeRequest, width: int, sizes: tuple[int, ...]) -> dict[str, Any]:
        launched.append((width, sizes))
        return result_of(*sizes)

    monkeypatch.setattr(command, "_launch", launch)
    asked = request(tmp_path)
    probe(asked, print)
    (again,) = probe(asked, print)
    assert again.result is None
    probe(request(tmp_path, widths=(1, 2), micro_batch_sizes=(1, 2, 4)), print)
    assert launched == [(1, (1, 2)), (1, (4,)), (2, (1, 2, 4))]
    profile = load_profile(asked.output)
    near = profile.nearest(asked.workload, "CPU", 2, "head")
    assert near is not None
    assert (near.width, near.times) == (2, PassTimes(0.5, 1.0))
    assert profile.nearest(asked.workload, "OTHER", 2, "head") is None


def test_an_interrupted_probe_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(asked: ProbeRequest, width: int, sizes: tuple[int, ...]) -> dict[str, Any]:
        if width == 2:
            raise CheckFailedError("rank 1 ended")
        return result_of(*sizes)

    monkeypatch.setattr(command, "_launch", launch)
    asked = request(tmp_path, widths=(1, 2))
    with pytest.raises(CheckFailedError):
        probe(asked, print)
    assert load_profile(asked.output).nearest(asked.workload, "CPU", 1, "head") is not None


def test_times_of_other_software_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_launch", lambda asked, width, sizes: result_of(*sizes))
    asked = request(tmp_path)
    probe(asked, print)
    data = json.loads(asked.output.read_text())
    data["provenance"]["CPU: torch"] = "1.0"
    asked.output.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="Write to another file"):
        probe(asked, print)


def test_a_tiny_layer_tells_the_launch_time(tmp_path: Path) -> None:
    """An operator of Megatron's takes longer than one of torch alone, and not a thousand times."""
    argv = megatron_flags(request(tmp_path), 1)

    def rank_main(rank: int) -> None:
        from timeit import repeat

        import torch

        from megatron_hetero.lab.probe.launching import measured_launch_s
        from megatron_hetero.lab.probe.pieces import PieceProbe, ProbeDoneError
        from megatron_hetero.runtime.job import entry

        try:
            entry.main(argv, observer=PieceProbe((1,), 0.1))
        except ProbeDoneError:
            found = measured_launch_s()
        small = torch.ones(1)
        alone = min(repeat(lambda: small.add_(1), number=100)) / 100
        (tmp_path / "found.json").write_text(json.dumps([alone, found]))

    run_jobs([LocalJob("probe", 1, rank_main, tmp_path)], timeout_s=100.0)
    alone, found = json.loads((tmp_path / "found.json").read_text())
    assert alone < found < 1000 * alone


def test_figures_of_a_type_are_kept_and_replaced_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([{"launch_s": 1e-5}, {}, {"launch_s": 2e-5}])
    monkeypatch.setattr(
        command, "_launch", lambda asked, width, sizes: result_of(*sizes) | next(results)
    )
    found = []
    for size in (1, 2, 4):
        probe(request(tmp_path, micro_batch_sizes=(size,)), print)
        found.append(load_profile(tmp_path / "profile.json").gpus["CPU"].launch_s)
    assert found == [1e-5, 1e-5, 2e-5]


def test_a_group_that_has_measured_is_no_fault_of_the_others(tmp_path: Path) -> None:
    """Ranks of one GPU each leave seconds apart, which no watch of a job may take for a fault."""
    flags = megatron_flags(request(tmp_path, num_busy=2), 1)

    def rank_main(rank: int) -> None:
        from megatron_hetero.lab.probe.pieces import PieceProbe, ProbeDoneError
        from megatron_hetero.runtime.job import entry

        class Late(PieceProbe):
            def post_wrap_hook(self, model: list[Any]) -> list[Any]:
                time.sleep(3 * rank)
                return super().post_wrap_hook(model)

        with pytest.raises(ProbeDoneError):
            entry.main(flags, observer=Late((1,), 0.1))
        # A rank of a probe measures its GPU's rates here, and then ends like this.
        time.sleep(6)
        (tmp_path / f"measured-{rank}").touch()
        os._exit(0)

    run_jobs([LocalJob("probe", 2, rank_main, tmp_path)], timeout_s=100.0)
    assert all((tmp_path / f"measured-{rank}").exists() for rank in range(2))


@pytest.mark.slow
def test_a_whole_probe_at_two_widths(tmp_path: Path) -> None:
    asked = request(tmp_path, widths=(1, 2), micro_batch_sizes=(1,), num_busy=2)
    assert [asked.num_ranks(width) for width in (1, 2)] == [2, 2]
    one, two = probe(asked, print)
    assert one.result is not None
    assert {rate["what"] for rate in one.result["rates"]} == {"product", "attention", "memory"}
    assert two.result is not None
    assert two.result["link"]["bytes_per_s"] > 0
    profile = load_profile(asked.output)
    assert profile.gpus["CPU"].launch_s == one.result["launch_s"] > 0
    assert profile.gpus["CPU"].context_bytes is None and two.result["communicator_bytes"] is None
    assert two.result["launch_s"] is None, "of a group it would have the messages"
    for width in (1, 2):
        near = profile.nearest(asked.workload, "CPU", width, "decoder_layer")
        assert near is not None
        assert (near.width, near.micro_batch_size) == (width, 1)
