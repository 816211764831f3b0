"""Plans beside a sheet of paper (`tools/check_by_hand.py`), and that the sheet is nobody else's."""

from __future__ import annotations

import ast
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cli.main import main as megatron_hetero
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.schedule.estimate import estimate_plan
from tools.by_hand.paper import NotByHandError, Paper, Stage
from tools.by_hand.site import Site
from tools.by_hand.traffic import ByGroups, add_by_groups
from tools.check_by_hand import Row, compared, main
from tools.check_invented import INVENTED, job_of, names, rows_of, run

ROOT = Path(__file__).resolve().parent.parent
SMALLEST = "three-desktops"


def wrong(rows: list[Row]) -> list[str]:
    return [f"{r.kind} of {r.what}: {r.program} beside {r.by_hand}" for r in rows if r.is_wrong]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A plan of the smallest cluster, quickly found, and its simulation."""
    folder = INVENTED / SMALLEST
    path = tmp_path_factory.mktemp("by_hand") / "plan.json"
    job, flags = job_of(folder)
    cluster = folder / "cluster.yaml"
    quick = ["--strategy", "constructive"]
    run("plan", "--cluster", cluster, "--model", job, "-o", path, *quick, *flags)
    return path, run("simulate", path, "--cluster", cluster)


def rows(plan: dict[str, Any], simulated: dict[str, Any]) -> list[Row]:
    return list(compared(plan, Site(INVENTED / SMALLEST / "cluster.yaml"), simulated))


def test_the_sheet_of_paper_imports_nothing_of_the_program() -> None:
    files = [*ROOT.glob("tools/by_hand/*.py"), ROOT / "tools/check_by_hand.py"]
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("megatron_hetero") for name in found), file


def test_a_plan_of_three_desktops_is_what_a_person_works_out(
    planned: tuple[Path, dict[str, Any]],
) -> None:
    path, simulated = planned
    found = rows(json.loads(path.read_text()), simulated)
    assert wrong(found) == []
    kinds = {row.kind for row in found if row.allowed is not None}
    assert kinds == {"FLOPs", "bytes", "load", "memory", "stage", "step"}


def test_what_crosses_between_groups_is_their_sums() -> None:
    """Machines a and b are near, c and d too: a adds up half of the range of its pair, and half of
    that half of all four."""
    names = ["a:0", "b:0", "c:0", "d:0"]
    members = [(name, Stage((name,), 0, 1, (1,), 1, 0, "none", 1)) for name in names]
    ranks = {name: rank for rank, name in enumerate(names)}
    paper = Paper(None, (), ranks, (("a", "b"), ("c", "d")))  # type: ignore[arg-type]
    found = ByGroups(float)
    add_by_groups(found, paper, members, 100.0, 100.0)
    assert found == {
        **dict.fromkeys([("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")], 100.0),
        **dict.fromkeys([("a", "c"), ("c", "a"), ("b", "d"), ("d", "b")], 50.0),
    }


def test_machines_with_fast_uplinks_add_up_more() -> None:
    """Of uplinks of 3, 2 and 1 the first owns 0.8, the second 0.2, and the last nothing."""
    names = ["a:0", "b:0", "c:0"]
    members = [(name, Stage((name,), 0, 1, (1,), 1, 0, "none", 1)) for name in names]
    ranks = {name: rank for rank, name in enumerate(names)}
    groups, uplinks = (("a",), ("b",), ("c",)), {"a": 3, "b": 2, "c": 1}
    paper = Paper(None, (), ranks, groups, uplinks)  # type: ignore[arg-type]
    found = ByGroups(float)
    add_by_groups(found, paper, members, 100.0, 100.0)
    assert found == pytest.approx({
        **dict.fromkeys([("a", "b"), ("b", "a")], 100.0),
        **dict.fromkeys([("a", "c"), ("c", "a")], 80.0),
        **dict.fromkeys([("b", "c"), ("c", "b")], 20.0),
    })  # fmt: skip


def test_what_is_off_is_found(planned: tuple[Path, dict[str, Any]]) -> None:
    path, simulated = planned
    plan = json.loads(path.read_text())

    spoiled = deepcopy(plan)
    device = next(iter(spoiled["estimates"]["devices"].values()))
    device["peak_bytes"] = int(1.06 * device["peak_bytes"])
    assert ["memory" in text for text in wrong(rows(spoiled, simulated))] == [True]

    spoiled = deepcopy(plan)
    spoiled["estimates"]["step_time_s"] *= 0.85
    found = wrong(rows(spoiled, simulated))
    assert len(found) == 2
    assert "step" in found[0] and "shorter than its slowest stage" in found[1]

    lines = [i for i, k in enumerate(simulated["links"]) if " -> " in k["name"]]
    for key, kind in (("num_bytes", "bytes"), ("busy_s", "load")):
        other = deepcopy(simulated)
        other["links"][lines[0]][key] *= 1.03
        assert [text.split()[0] for text in wrong(rows(plan, other))] == [kind]
    other = deepcopy(simulated)
    del other["links"][lines[0]]
    assert [text.split()[0] for text in wrong(rows(plan, other))] == ["bytes", "load"]

    other = deepcopy(simulated)
    other["utilization"]["model_flops"] /= 3
    assert ["FLOPs" in text for text in wrong(rows(plan, other))] == [True]


def test_a_line_that_carries_more_than_it_can_is_found(
    planned: tuple[Path, dict[str, Any]],
) -> None:
    path, simulated = planned
    other = deepcopy(simulated)
    other["step_time_s"] /= 10
    assert any("more than it can" in text for text in wrong(rows(load(path), other)))


def test_what_has_no_formula_is_said_and_fails(
    planned: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, simulated = planned
    plan = load(path)
    plan["replicas"][0]["stages"][0]["shape"]["context_parallel"] = 2
    with pytest.raises(NotByHandError, match="context parallelism"):
        rows(plan, simulated)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "simulated.json").write_text(json.dumps(simulated))
    cluster = INVENTED / SMALLEST / "cluster.yaml"
    words = [tmp_path / "plan.json", "--cluster", cluster]
    words += ["--simulated", tmp_path / "simulated.json"]
    assert main(list(map(str, words))) == 1
    assert "cannot be checked by hand: context parallelism" in capsys.readouterr().err


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


UNLIKE = """
version: 1
nodes:
  - {name: a, gpu: A100-40GB, count: 4, site: here}
  - {name: b, gpu: RTX-4090, count: 3, site: here, uplink: 5 Gb/s}
  - {name: c, gpu: GPU, count: 4, site: there}
sites:
  there: {uplink: 4 Gb/s}
links:
  inside_node:
    A100-40GB: {bandwidth: 230 GB/s, latency: 6 us}
    RTX-4090: {bandwidth: 18 GB/s, latency: 12 us}
    GPU: {bandwidth: 12 GB/s, latency: 12 us}
  between_nodes: {bandwidth: 10 Gb/s, latency: 30 us}
  between_sites:
    - {sites: [here, there], bandwidth: 6 Gb/s, latency: 2 ms, jitter: 1 ms}
"""
SIZES = (
    "--num-layers 12 --hidden-size 1536 --num-attention-heads 24 --seq-length 1536 "
    "--max-position-embeddings 1536 --vocab-size 32000 --micro-batch-size 1 "
    "--global-batch-size 48 --lr 1e-4"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 12 "
    "--hidden-dropout 0 --attention-dropout 0 --ffn-hidden-size 4224"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 2112 --sequence-parallel"
DIVIDED = "--use-distributed-optimizer"
WIDE, DEEP = "tp4:4,tp3(1:1:1):4,tp2:2,tp2:2 @48", "tp2:6,tp2:6 @20 | tp3(2:1:1):12 @8 | tp4:12 @20"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (WIDE, "--bf16"),
        (WIDE, f"--bf16 {LLAMA} --sequence-parallel"),
        (WIDE, f"--fp16 {FULL}"),
        (WIDE, f"--bf16 {LLAMA} --recompute-granularity selective"),
        (DEEP, "--bf16"),
        (DEEP, f"--bf16 {LLAMA} {DIVIDED}"),
        (DEEP, f"--fp16 {DIVIDED} --overlap-grad-reduce"),
        (DEEP, f"--bf16 {LLAMA} {EXPERTS} {DIVIDED}"),
    ],
)
def test_typed_layouts_of_unlike_widths(
    layout: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        UNLIKE.replace("GPU,", "T4," if "--fp16" in flags else "L4,").replace(
            "GPU:", "T4:" if "--fp16" in flags else "L4:"
        )
    )
    (tmp_path / "job.flags").write_text(f"{SIZES} {flags}")
    machines, workload = load_cluster(cluster), load_workload(tmp_path / "job.flags")
    plan = place_in_order(plan_from_layout(parse_layout(layout), workload), machines)
    plan = replace(plan, workload=workload)
    plan = replace(plan, estimates=estimate_plan(plan, machines))
    save_plan(plan, path := tmp_path / "plan.json")
    assert megatron_hetero(["simulate", str(path), "--cluster", str(cluster), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert wrong(list(compared(load(path), Site(cluster), simulated))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_invented_clusters(name: str, tmp_path: Path) -> None:
    found = rows_of(name, tmp_path)
    assert wrong(found) == []
    assert not [row for row in found if row.kind == "load" and (row.program or 0) > 1]
