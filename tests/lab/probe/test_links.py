"""Constants of links fitted to exchanges: exact ones found again, and a sweep over processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_hetero.cli.main import main
from megatron_hetero.errors import FileFormatError
from megatron_hetero.exchange.terms import term_counts
from megatron_hetero.lab.probe.link_fit import (
    GenModelFit,
    MeasuredExchange,
    fit_for_cluster_file,
    fit_genmodel,
    held_out,
)
from megatron_hetero.lab.probe.links import SIZES, exchanges, sweep
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World

TRUE = GenModelFit(20e-6, 8e-10, 1e-10, 5e-11, 4e-10, 2)
SHARED_CARD = GenModelFit(50e-6, 1e-8, 0.0, 1e-10, 1e-8, 1)


def measured(
    true: GenModelFit, most_holders: int = 8, noise: float = 0.0
) -> list[MeasuredExchange]:
    """Return exchanges that take what `true` says, but for relative noise."""
    random = np.random.default_rng(7)
    found = []
    for num_holders in range(2, most_holders + 1):
        for num_bytes in SIZES:
            for plan in exchanges(num_holders, num_bytes // 4):
                counts = term_counts(plan)
                exact = MeasuredExchange(plan.name, num_holders, num_bytes, counts, 1.0)
                seconds = true.seconds(exact) * (1 + noise * random.standard_normal())
                found.append(MeasuredExchange(plan.name, num_holders, num_bytes, counts, seconds))
    return found


def test_the_seconds_of_a_ring_are_the_formula() -> None:
    # Reduce-scatter of 4 MiB: 3 rounds, 0.75 of the buffer sent and added, 2.25 accessed.
    ring = next(
        each for each in measured(TRUE) if each.num_holders == 4 and each.num_bytes == 1 << 22
    )
    assert ring.name == "ring" and ring.counts.num_rounds == 3
    size = 1 << 22
    expected = 3 * 20e-6 + 0.75 * size * 8e-10 + 0.75 * size * 1e-10 + 2.25 * size * 5e-11
    assert TRUE.seconds(ring) == pytest.approx(expected)


def test_exact_seconds_give_the_constants_back() -> None:
    fit = fit_genmodel(measured(TRUE))
    assert fit.num_senders == 2
    for name in ("round_s", "sent_s_per_byte", "added_s_per_byte", "accessed_s_per_byte"):
        assert getattr(fit, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)
    assert fit.incast_s_per_byte == pytest.approx(TRUE.incast_s_per_byte, rel=1e-4)
    assert np.abs(fit.errors(measured(TRUE))).max() < 1e-6


def test_sizes_that_were_not_fitted_are_predicted_better_than_without_access_and_incast() -> None:
    errors = held_out(measured(TRUE, noise=0.02))
    assert np.abs(errors.genmodel).mean() < 0.03
    assert np.abs(errors.simpler).mean() > 2 * np.abs(errors.genmodel).mean()


def test_a_cluster_file_gets_the_links_in_its_own_words() -> None:
    lines = list(fit_for_cluster_file(measured(SHARED_CARD)).cluster_lines())
    assert lines == [
        "link:",
        "  bandwidth: 0.1 GB/s",
        "  latency: 50 us",
        "  reduce_bandwidth: 10 GB/s",
        "  incast: {senders: 1, slowdown: 1}",
    ]


def test_two_holders_say_nothing_of_incast() -> None:
    fit = fit_for_cluster_file(measured(SHARED_CARD, most_holders=2))
    assert fit.incast_s_per_byte == 0.0
    assert not any("incast" in line for line in fit.cluster_lines())


def test_too_few_sizes_are_refused() -> None:
    few = [each for each in measured(TRUE, 3) if each.num_bytes in SIZES[:3]]
    with pytest.raises(FileFormatError, match="3 sizes cannot be halved"):
        held_out(few)
    with pytest.raises(FileFormatError, match="two sizes"):
        fit_genmodel([each for each in few if each.num_bytes == SIZES[0]])


def test_seconds_that_do_not_grow_are_refused() -> None:
    flat = [
        MeasuredExchange(each.name, each.num_holders, each.num_bytes, each.counts, 1e-3)
        for each in measured(TRUE, 2)
    ]
    with pytest.raises(FileFormatError, match="no bandwidth follows"):
        fit_genmodel(flat)


def test_a_sweep_over_processes_measures_every_exchange(tmp_path: Path) -> None:
    sizes = (1 << 12, 1 << 16)

    def run(rank: int) -> None:
        backend.activate_cpu_backend()
        world = World.from_environment()
        dist.init_process_group("gloo", store=world.store(), rank=world.rank, world_size=world.size)
        found = [(each.name, each.num_holders, each.num_bytes, each.seconds)
                 for each in sweep(sizes, 0.001)]  # fmt: skip
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()

    run_jobs([LocalJob("links", 3, run, tmp_path)], 60)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found == json.loads((tmp_path / "2.json").read_text())
    names = [
        f"{plan.name}, {plan.purpose}" for n in (2, 3) for _ in sizes for plan in exchanges(n, 4)
    ]
    assert [row[0] for row in found] == names and all(row[3] > 0 for row in found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--links", "--pairs"], "two measurements"),
        (["--links", "--gpus", "1"], "--links needs two cards or processes"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *flags]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
