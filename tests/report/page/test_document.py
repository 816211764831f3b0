"""The page: whole, true to its data, safe, self-contained and readable in both colour themes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_hetero.cluster.lines import Line
from megatron_hetero.errors import EnvironmentMismatchError, FileFormatError
from megatron_hetero.plan.estimates import TrafficEstimate
from megatron_hetero.plan.plan import Plan
from megatron_hetero.report import picture
from megatron_hetero.report.content import Content, Lane, LaneGroup, gather
from megatron_hetero.report.page.bars import busy_bars, memory_bars
from megatron_hetero.report.page.cluster_map import _between_sites, _first_that_fits
from megatron_hetero.report.page.document import figures, page
from megatron_hetero.report.page.figure import Figure, style, ticks
from megatron_hetero.report.page.folding import NEAR, folded, runs
from megatron_hetero.report.page.lanes import measured_lanes, rehearsed_lanes, trace_lanes
from megatron_hetero.report.page.pipelines import pipelines
from megatron_hetero.report.page.timeline import close_up, timeline
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.parts import OpSpan
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.preflight.jobs import COMPLETE, planned, with_width

PLAN, CLUSTER = planned(("fast", "A100-80GB", 2), ("slow", "RTX-4090", 2))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def content() -> Content:
    return gather(PLAN, CLUSTER)


def shapes(figure: Figure, kind: str) -> list[ET.Element]:
    root = ET.fromstring(figure.standalone())
    return [e for e in root.iter() if e.get("class") == kind]


def test_every_figure_is_well_formed_and_stays_inside(content: Content) -> None:
    for figure in figures(content):
        root = ET.fromstring(figure.standalone())
        for shape in root.iter(f"{SVG}rect"):
            if shape.get("class") == "page":
                continue
            assert float(shape.get("x", 0)) >= 0
            right = float(shape.get("x", 0)) + float(shape.get("width", 0))
            assert right <= figure.width + 1, figure.name
            assert float(shape.get("y", 0)) + float(shape.get("height", 0)) <= figure.height + 1


def test_the_page_has_every_gpu_and_every_command(content: Content) -> None:
    text = page(content)
    for device in CLUSTER.devices:
        assert f"{device.name}:" in text
    for launch in content.launches:
        assert launch.argv[0] in text
    assert "<h2>Run it</h2>" in text
    assert "on 2 machines" in text


def test_flags_of_a_model_alone_are_said_to_be_no_job(content: Content) -> None:
    assert PLAN.workload is not None
    for args, is_whole in ((("--num-layers", "8"), False), (COMPLETE, True)):
        workload = replace(PLAN.workload, megatron_args=args)
        text = page(replace(content, plan=replace(PLAN, workload=workload)))
        assert ("cannot start without --train-iters" in text) == (not is_whole)


class _References(HTMLParser):
    """Everything by which a page could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("link", "img", "iframe", "object", "embed", "base"):
            self.found.append(tag)
        names = [name for name, _ in attrs]
        self.found += [f"{tag} {n}" for n in names if n in ("src", "href", "xlink:href")]


def test_the_page_refers_to_nothing_outside(content: Content) -> None:
    text = page(content)
    parser = _References()
    parser.feed(text)
    assert parser.found == []
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_names_of_users_are_text_and_never_markup(content: Content) -> None:
    assert content.plan.workload is not None
    evil = "<script>alert(1)</script>\"'&"
    workload = replace(content.plan.workload, source=evil)
    nodes = tuple(replace(n, site=evil) for n in CLUSTER.nodes)
    changed = replace(
        content,
        plan=replace(content.plan, workload=workload, made_by=evil, inputs={evil: evil}),
        cluster=replace(CLUSTER, nodes=nodes),
        plan_name=evil,
    )
    text = page(changed)
    assert "alert(1)" in text
    assert "<script>alert" not in text
    for figure in figures(changed):
        ET.fromstring(figure.standalone())


def test_the_timeline_is_the_simulation(content: Content) -> None:
    """Widths and places of all forwards are their times, on one scale."""
    drawn = shapes(timeline(content.timelines), "forward")[1:]  # without the legend's
    wanted = [
        o for lane in content.timelines[0].lanes for o in lane.operations if o.kind == "forward"
    ]
    assert len(drawn) == len(wanted)
    scale = (1120 - 190) / content.simulation.step_time_s
    for shape, operation in zip(drawn, wanted, strict=True):
        assert float(shape.get("x", 0)) == pytest.approx(190 + operation.start_s * scale, abs=0.06)
        width = (operation.end_s - operation.start_s) * scale
        assert float(shape.get("width", 0)) == pytest.approx(width, abs=0.9)


def test_many_operations_stay_a_small_figure_of_one_path_a_lane_and_kind() -> None:
    operations = tuple(
        OpSpan(kind, k, 0, 2 * k + offset, 2 * k + offset + 1)
        for k in range(256)
        for offset, kind in enumerate(("forward", "backward"))
    )
    # Groups of unlike sizes: no two lanes look alike.
    lanes = tuple(Lane(0, s, tuple(f"n:{i}" for i in range(s + 1)), operations) for s in range(64))
    figure = timeline((LaneGroup("predicted", 512.0, lanes),))
    assert len(figure.body) < 1_500_000
    assert figure.body.count("<path") == 2 * 64
    assert close_up((LaneGroup("predicted", 512.0, lanes),)) is not None


def test_memory_bars_add_up_to_the_peak(content: Content) -> None:
    figure = memory_bars(content)
    root = ET.fromstring(figure.standalone())
    rows: dict[str, float] = {}
    for shape in root.iter(f"{SVG}rect"):
        if shape.find(f"{SVG}title") is not None:
            key = shape.get("y", "")
            rows[key] = rows.get(key, 0.0) + float(shape.get("width", 0))
    largest = max(d.capacity_bytes for d in content.estimates.devices.values())
    peaks = sorted(
        max(content.estimates.devices[d].peak_bytes for d in stage.devices) * (1120 - 450) / largest
        for replica in content.plan.replicas
        for stage in replica.stages
    )
    assert sorted(rows.values()) == pytest.approx(peaks, abs=0.4)


def test_what_if_moves_the_right_way() -> None:
    # Without the host's launches, for which passes of so small a model wait whatever the GPU.
    nodes = tuple(replace(n, gpu_type=replace(n.gpu_type, launch_s=0.0)) for n in CLUSTER.nodes)
    content = gather(PLAN, replace(CLUSTER, nodes=nodes))
    change = {v.what: v.change for v in content.what_if}
    assert change["network between machines at twice its speed"] <= 1e-9
    assert change["network between machines at half its speed"] >= -1e-9
    slowed = [v.change for v in content.what_if if "90%" in v.what]
    assert len(slowed) == 2
    assert all(0 <= c <= 1 / 0.9 - 1 + 1e-9 for c in slowed)
    assert max(slowed) > 0.01


def rehearsal(tmp_path: Path, **changes: object) -> Path:
    stages = [
        {
            "replica": stage.replica,
            "stage": stage.stage,
            "operations": [o._asdict() for o in stage.operations],
        }
        for stage in simulate_plan(PLAN, CLUSTER).timelines
    ]
    path = tmp_path / "rehearsal.json"
    data: dict[str, object] = {"rehearsed_step_time_s": 3.0, "stages": stages, "more": 1}
    path.write_text(json.dumps(data | changes))
    return path


def test_a_rehearsal_gets_lanes_of_its_own(content: Content, tmp_path: Path) -> None:
    group = rehearsed_lanes(rehearsal(tmp_path), PLAN)
    both = timeline((*content.timelines, group))
    assert "rehearsed: 3 s a step" in both.body
    assert len(shapes(both, "lane")) == 2 * len(content.timelines[0].lanes)


def test_prediction_rehearsal_and_measurement_share_one_axis(
    content: Content, tmp_path: Path
) -> None:
    rehearsed = rehearsed_lanes(rehearsal(tmp_path), PLAN)
    job = rehearsal(tmp_path, measured_step_time_s=3.5, step=11)
    groups = (*content.timelines, rehearsed, measured_lanes(job, PLAN))
    drawn = timeline(groups)
    assert "measured, step 11: 3.5 s a step" in drawn.body
    assert len(shapes(drawn, "lane")) == 3 * len(content.timelines[0].lanes)
    assert list(trace_lanes(groups)) == ["predicted", "rehearsed", "measured, step 11"]


def test_the_rehearsal_of_another_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="another plan"):
        rehearsed_lanes(
            rehearsal(tmp_path, stages=[{"replica": 9, "stage": 0,
                                         "operations": []}]), PLAN)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": "tp8:1 @1"}, "of another plan: its layout is tp8:1 @1, the plan's "),
        ({"elsewhere": True}, "of another plan: replica 0 stage 0 is on far:0 there"),
    ],
)
@pytest.mark.parametrize("read", [rehearsed_lanes, measured_lanes])
def test_the_timeline_of_a_plan_with_as_many_stages_is_refused(
    read: Callable[[Path, Plan], LaneGroup],
    changes: dict[str, object],
    words: str,
    tmp_path: Path,
) -> None:
    path = rehearsal(tmp_path, measured_step_time_s=3.5, step=11)
    data = json.loads(path.read_text()) | changes
    if data.pop("elsewhere", False):
        data["stages"][0]["devices"] = ["far:0"]
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=words):
        read(path, PLAN)


def test_a_measured_step_without_backward_passes_is_refused(tmp_path: Path) -> None:
    group = rehearsed_lanes(rehearsal(tmp_path), PLAN)
    stages = [
        {
            "replica": lane.replica,
            "stage": lane.stage,
            "operations": [o._asdict() for o in lane.operations if o.kind == "forward"],
        }
        for lane in group.lanes
    ]
    path = rehearsal(tmp_path, measured_step_time_s=3.5, step=11, stages=stages)
    with pytest.raises(FileFormatError, match="replica 0 stage 0 has no backward pass"):
        measured_lanes(path, PLAN)


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_readable_in_both_themes() -> None:
    """WCAG: 4.5 for text, 3 for shapes that carry meaning."""
    blocks = re.findall(r"\{([^{}]*--page:[^{}]*)\}", style())
    assert len(blocks) == 3
    for block in blocks:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for text in ("ink", "soft"):
            for ground in ("page", "card", "lane"):
                assert _contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        for shape in ("forward", "sync", "update", "good", "bad", *(f"p{i}" for i in range(8))):
            assert _contrast(colors[shape], colors["page"]) >= 3, shape
        assert _contrast(colors["on"], colors["forward"]) >= 4.5
        for shape in ("backward", "weight"):
            assert _contrast(colors["dark"], colors[shape]) >= 4.5, shape
        # Forward and backward also differ in lightness, for eyes and printers without colour.
        assert _contrast(colors["forward"], colors["backward"]) >= 1.4


@pytest.mark.parametrize("limit", [1e-4, 0.3, 0.999, 1.0, 7.3, 11.9, 86400.0])
def test_ticks_are_few_and_inside(limit: float) -> None:
    found = ticks(limit)
    assert 2 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] <= limit * (1 + 1e-9)
    assert len({round(b - a, 12) for a, b in pairwise(found)}) == 1


def test_png_without_a_browser_says_what_else_there_is(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "BROWSERS", ("no-such-browser",))
    with pytest.raises(EnvironmentMismatchError, match="--svg"):
        picture.draw_png(figures(content)[0], tmp_path / "map.png")


def test_no_text_leaves_a_tile_of_the_map() -> None:
    """By the widest usual font; layers of three digits and tens of replicas too."""
    for words in (
        ["R0 stage 0", "R0 s0"],
        ["R12 stage 10", "R12 s10"],
        ["layers 100-119", "100-119"],
    ):
        shown = _first_that_fits(words, 77.0, 7.3)
        assert shown in words
        assert len(shown) * 7.3 <= 77.0


def test_rows_that_look_alike_are_one_of_many() -> None:
    rows = [(r, s) for r in range(10) for s in range(4)]

    def near(row: tuple[int, int]) -> tuple[float]:
        return (row[0] * NEAR / 9,)

    found = folded(rows, lambda row: row[1], near)
    assert [(row.first, row.num_more) for row in found] == [((0, s), 9) for s in range(4)]
    assert [row.rows for row in folded(rows[:16], lambda row: row[1], near)] == [
        (row,) for row in rows[:16]
    ]
    apart = folded(rows, lambda row: row[1], lambda row: (row[0] * 1.01 * NEAR / 9,))
    assert [row.num_more for row in apart] == [8] * 4 + [0] * 4
    neighbours = runs([1, 1, 2, 1], lambda row: row, lambda row: (0.0,))
    assert [row.rows for row in neighbours] == [(1, 1), (2,), (1,)]


FORTY = [(f"n{i}", "RTX-4090", 8) for i in range(5)]


@pytest.mark.parametrize(
    ("layout", "boxes"),
    [
        (", ".join(["tp1:1"] * 40) + " @ 160", 7),
        (" | ".join(["tp1:1, tp1:1, tp1:1, tp1:1 @ 8"] * 10), 3),
    ],
    ids=["40 stages", "10 replicas"],
)
def test_forty_near_equal_rows_fold(content: Content, layout: str, boxes: int) -> None:
    plan, cluster = with_width(FORTY, layout)
    estimates = estimate_plan(plan, cluster)
    simulation = simulate_plan(plan, cluster)
    changed = replace(
        content, plan=plan, cluster=cluster, estimates=estimates, simulation=simulation
    )
    lanes = tuple(Lane(t.replica, t.stage, t.devices, t.operations) for t in simulation.timelines)
    drawn = pipelines(plan, cluster, estimates)
    assert len(re.findall(r"<title>(?:stages? )?\d", drawn.body)) == boxes
    step = timeline((LaneGroup("predicted", simulation.step_time_s, lanes),))
    assert len(shapes(step, "lane")) <= 16
    assert len(shapes(busy_bars(plan, simulation), "lane")) <= 4
    assert len(shapes(memory_bars(changed), "room")) <= 20
    for figure in (drawn, step, busy_bars(plan, simulation), memory_bars(changed)):
        assert "alike" in figure.body or figure is drawn


def test_the_price_is_broken_down_by_what_causes_traffic(content: Content) -> None:
    assert "Of the price of an hour" not in page(content)
    traffic = tuple(
        TrafficEstimate(cause, ("east", "west"), 2e9, price)
        for cause, price in (("stage boundaries", 5.0), ("gradient exchange", 1.5))
    )
    priced = replace(
        content.estimates, price_per_hour=4.0, traffic_price_per_hour=6.5, traffic=traffic
    )
    text = page(replace(content, estimates=priced))
    assert "<li>4.00: machines</li>" in text
    assert "5.00: stage boundaries, between east and west" in text
    assert "1.50: gradient exchange" in text


def test_a_bound_of_some_plans_is_not_called_one_of_all(content: Content) -> None:
    assert content.estimates.bound_s is not None
    for divided_s, said in ((None, True), (0.5, False)):
        estimates = replace(content.estimates, bound_with_context_parallel_s=divided_s)
        text = page(replace(content, estimates=estimates))
        assert ("no plan can be faster than" in text) is said
        assert ("none is faster than 500 ms" in text) is not said


def test_the_map_says_which_lines_between_sites_are_shared() -> None:
    nodes = [replace(node, site=f"s{i}") for i, node in enumerate(CLUSTER.nodes)]
    apart = replace(CLUSTER, nodes=tuple(nodes), site_lines={})
    assert "shared" not in " ".join(_between_sites(apart, ["s0", "s1"]))
    line = Line("line s0 to s1", 1e9)
    joined = replace(apart, site_lines={("s0", "s1"): (line,), ("s1", "s0"): (line,)})
    assert "shared by all" in " ".join(_between_sites(joined, ["s0", "s1"]))
