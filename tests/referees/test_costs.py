"""The prices that our planner gets are the referee's own, on random placements and on the bench."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.effort import QUICK
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.errors import FileFormatError, UnsupportedError
from tools.bench.search.planners import CASES, RESULT_FIELDS
from tools.referees.cases import Case, load_case
from tools.referees.waiting.bound import referee_bound

ROOT = CASES.parents[1]
SMALL = {
    "hexiscale": """
        version: 1
        case: tiny
        referee: hexiscale
        cluster:
          between_machines_gb_per_s: 0.5
          machines: [{device: A100, gpus: 4}, {device: 4090, gpus: 4}, {device: 3090, gpus: 2}]
        model: 7B
        batch: {sequences: 12}
        anchor: {value: 100.0, unit: s, source: made up}
        """,
    "sailor": """
        version: 1
        case: tiny
        referee: sailor
        cluster:
          machines:
            - {device: A100-40, gpus: 4, count: 2}
            - {device: V100-16, gpus: 4}
            - {device: V100-16, gpus: 4, zone: us-west1-b}
            - {device: A100-40, gpus: 4, zone: us-central1-b}
        model: OPT-350
        batch: {sequences: 48, micro_batch_sizes: [1, 2]}
        anchor: {value: 0.01, unit: it/s, source: made up}
        """,
}


def case_file(folder: Path, referee: str, **changes: str) -> Path:
    text = "\n".join(line[8:] for line in SMALL[referee].splitlines())
    for old, new in changes.items():
        text = text.replace(f"{old}:", f"{new}:")
    path = folder / f"{referee}.yaml"
    path.write_text(text)
    return path


@st.composite
def placements(draw: st.DrawFn, nodes: dict[str, int], num_layers: int) -> Placement:
    """Groups of random widths from whole nodes, in random chains with random layers."""
    groups: list[tuple[Device, ...]] = []
    for node, num_gpus in nodes.items():
        width = draw(st.sampled_from([w for w in (1, 2, 4) if w <= num_gpus]))
        groups += [
            tuple(Device(node, i) for i in range(start, start + width))
            for start in range(0, num_gpus - width + 1, width)
        ]
    groups = draw(st.permutations(groups))
    num_replicas = draw(st.integers(1, min(4, len(groups))))
    replicas = []
    for r in range(num_replicas):
        chain = groups[r::num_replicas]
        inner = st.integers(1, num_layers - 1)
        cuts = sorted(draw(st.sets(inner, min_size=len(chain) - 1, max_size=len(chain) - 1)))
        ends = [*cuts, num_layers]
        layers = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
        stages = tuple(PlacedStage(g, n) for g, n in zip(chain, layers, strict=True))
        replicas.append(PlacedReplica(stages, draw(st.integers(1, 20))))
    return Placement(tuple(replicas))


@cache
def small_case(referee: str) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        return load_case(case_file(Path(folder), referee))


@cache
def bound_s(referee: str, number: int) -> float:
    """The bound on all plans of one of the questions of the small case."""
    question = small_case(referee).questions[number]
    costs = question.make_costs(question.cluster, question.workload, None)
    return referee_bound(costs, effort=QUICK).step_time_s


@pytest.mark.parametrize("referee", ["hexiscale", "sailor"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_our_prices_are_the_referees(referee: str, data: st.DataObject) -> None:
    questions = small_case(referee).questions
    number = data.draw(st.integers(0, len(questions) - 1))
    question = questions[number]
    cluster, workload = question.cluster, question.workload
    nodes = {node.name: node.num_gpus for node in cluster.nodes}
    placement = data.draw(placements(nodes, workload.model.num_layers))
    costs = question.make_costs(cluster, workload, None)
    cost, score = costs.placement(placement), question.score(placement)
    assert cost.step_time_s == pytest.approx(score.step_s, rel=1e-12)
    assert abs(cost.missing_bytes - score.missing_bytes) <= 8
    replicas = placement.replicas
    num_micro_batches = workload.training.global_batch_size // workload.training.micro_batch_size
    fits = cost.missing_bytes <= 0  # the bound is of plans that fit
    if fits and sum(r.num_micro_batches for r in replicas) >= num_micro_batches:
        assert bound_s(referee, number) <= score.step_s * (1 + 1e-12)


def test_a_plan_over_a_network_that_was_not_measured_has_no_score(tmp_path: Path) -> None:
    path = case_file(tmp_path, "sailor")
    path.write_text(path.read_text().replace("V100-16", "GH-96"))
    question = load_case(path).questions[0]
    stages = tuple(PlacedStage((Device(f"m000{i}", 0),), 12) for i in (0, 3))
    with pytest.raises(UnsupportedError, match="no network"):
        question.score(Placement((PlacedReplica(stages, 48),)))


@pytest.mark.parametrize("referee", ["hexiscale", "sailor"])
def test_the_searchs_quick_times_are_near_its_prices(tmp_path: Path, referee: str) -> None:
    """With sends counted where the referee counts them, a lone replica is priced exactly."""
    question = load_case(case_file(tmp_path, referee)).questions[0]
    costs = question.make_costs(question.cluster, question.workload, None)
    names = [node.name for node in question.cluster.nodes]
    total = question.workload.model.num_layers
    layers = [1] * (len(names) - 1)
    stages = tuple(
        PlacedStage((Device(name, 0),), n)
        for name, n in zip(names, [total - len(layers), *layers], strict=True)
    )
    replica = PlacedReplica(stages, 9)
    rows = costs.vocab_rows([1])
    priced = costs.replica(replica, rows)
    groups = [stage.devices for stage in stages]
    times_s = [
        stage.times.total_s + load
        for stage, load in zip(priced.stages, costs.send_loads_s(groups), strict=True)
    ]
    fill_s, period_s = costs.quick_times_s(times_s, groups)
    assert fill_s + 8 * period_s == pytest.approx(priced.pipeline_s)


def test_every_published_case_can_be_read() -> None:
    cases = [load_case(path) for path in sorted(CASES.glob("*.yaml"))]
    assert len({case.model.case for case in cases}) == len(cases) >= 19
    assert {case.model.referee for case in cases} == {"hexiscale", "sailor"}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("model", "modell", "modell"),
        ("device: A100-40", "device: A100-41", "the referee knows V100-16"),
        ("OPT-350", "OPT-351", "there are GPT-Neo-2.7"),
        ("sequences: 48", "sequences: 47", "no multiple of micro-batch size 2"),
        ("sequences: 48", "sequences: -1", "sequences"),
        ("unit: it/s", "unit: steps", "unit"),
        ("  machines", "  between_machines_gb_per_s: 1.0\n  machines", "is HexiScale's"),
    ],
)
def test_what_is_wrong_with_a_case_is_said(tmp_path: Path, old: str, new: str, fault: str) -> None:
    path = case_file(tmp_path, "sailor")
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(FileFormatError, match=fault) as error:
        load_case(path)
    assert str(path) in str(error.value)


def test_the_bench_from_end_to_end(tmp_path: Path) -> None:
    paths = [case_file(tmp_path, referee) for referee in SMALL]
    for path in paths:  # 4 to 6 GPUs: the search takes a second
        path.write_text(
            path.read_text().replace("gpus: 4", "gpus: 1").replace("count: 2", "count: 1")
        )
    files = [str(path) for path in paths]
    done = subprocess.run(
        [sys.executable, "tools/bench", "planners", "--json", "--cases", *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [tuple(result) for result in results] == [RESULT_FIELDS] * 2
    seconds, iterations = results
    assert seconds["bound"] <= seconds["score"]
    assert seconds["ratio"] == pytest.approx(100 / seconds["score"])
    assert seconds["gap"] == pytest.approx(seconds["score"] / seconds["bound"] - 1)
    assert iterations["bound"] >= iterations["score"]
    assert iterations["ratio"] == pytest.approx(iterations["score"] / 0.01)
    assert all(r["fits"] and r["search_s"] > 0 and r["peak_memory_mib"] > 1 for r in results)
