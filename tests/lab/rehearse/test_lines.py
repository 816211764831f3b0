"""Traffic of pipelines on a line that unlike sites share, as sent and as simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.lab.rehearse.rehearsal import rehearsal_to_data
from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.cost.network.test_nics import several
from tests.lab.rehearse.test_rehearse import with_hosts
from tests.schedule.simulator.test_step import placed

SPEED = 1e9
CLUSTER = replace(
    make_cluster(
        ("a", FAST, 1), ("b", FAST, 1), ("c", SLOW, 1), ("d", SLOW, 1),
        between=Link(SPEED, 1e-3), sites=["east", "east", "west", "west"],
    ),
    site_lines={
        ("east", "west"): (Line("line east -> west", SPEED),),
        ("west", "east"): (Line("line west -> east", SPEED),),
    },
)  # fmt: skip


def test_a_shared_line_carries_what_is_simulated(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}
    layout, devices = "tp1:2,tp1:2 @3 | tp1:3,tp1:1 @3", (["a:0", "c:0"], ["b:0", "d:0"])
    plan = placed(layout, *devices, num_layers=4, tied_embeddings=False, **sizes)
    plan = with_hosts(plan, CLUSTER)
    found = rehearse(plan, CLUSTER, None, RehearsalOptions(steps=1), tmp_path)
    assert abs(found.error) < 0.08, rehearsal_to_data(found, plan)
    loads = {line.name: line for line in found.lines}
    for name in ("line east -> west", "line west -> east"):
        assert loads[name].rehearsed_s == pytest.approx(loads[name].predicted_s, rel=1e-3)
    # Six activations of a boundary each way, whichever pair of nodes they cross between, and
    # gradients of the layer that both sides hold.
    activation_s = 1024 * 1024 * 4 / SPEED
    assert loads["line east -> west"].rehearsed_s > 6 * activation_s


@pytest.mark.slow
def test_gpus_send_over_the_nics_near_them(tmp_path: Path) -> None:
    """Two pipelines, of which those on b share a NIC and those on a do not."""
    made = make_cluster(("a", FAST, 4), ("b", FAST, 4), between=Link(SPEED, 1e-3))
    cluster = several(made, 2)
    sizes = {"hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}
    layout, devices = "tp1:3,tp1:1 @3 | tp1:2,tp1:2 @3", (["a:0", "b:0"], ["b:1", "a:3"])
    plan = placed(layout, *devices, num_layers=4, tied_embeddings=False, **sizes)
    plan = with_hosts(plan, cluster)
    options = RehearsalOptions(steps=1, time_scale=15.0)
    found = rehearse(plan, cluster, None, options, tmp_path)
    assert abs(found.error) < 0.08, rehearsal_to_data(found, plan)
    loads = {line.name: line for line in found.lines}
    # The embedding, which NIC 1 of a does not carry, is rounded in the small model.
    for name, part in (("NIC 1 of a", 1e-3), ("NIC 0 of a", 0.05), ("NIC 0 of b", 0.05)):
        for way in ("in", "out"):
            load = loads[f"{name} {way}"]
            assert load.rehearsed_s == pytest.approx(load.predicted_s, rel=part), load
            assert load.rehearsed_s > 0.05
