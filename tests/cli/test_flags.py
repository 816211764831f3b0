"""`flags`: bash that says what it means, one command for each node, JSON with the same content."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.flags import comment
from megatron_hetero.cli.main import main
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from tests.cost.builders import CLUSTER, make_workload


def test_bash_style_is_bash(layout_plan: Callable[..., Path], capsys) -> None:
    path = layout_plan()
    assert main(["flags", str(path)]) == 0
    script = capsys.readouterr().out
    # torchrun is replaced by a function that prints its words, one a line.
    probe = "torchrun() { printf '%s\\n' \"$@\"; }\n" + script
    done = subprocess.run(["bash", "-eu"], input=probe, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--local-addr", "localhost",
        "--nproc-per-node", "4", "-m", "megatron_hetero.pretrain_gpt",
        "--hetero-layout", "tp2:3,tp1:1 @4 | tp1:4 @2",
    ]  # fmt: skip
    assert done.stderr == ""


def test_bash_style_says_why_the_plug_in_is_needed(
    layout_plan: Callable[..., Path], capsys
) -> None:
    main(["flags", str(layout_plan())])
    text = capsys.readouterr().out
    assert text.startswith("# tp2:3,tp1:1 @4 | tp1:4 @2\n# Stock Megatron cannot run this plan")
    assert "#   stages of different tensor-parallel widths (1, 2)\n" in text


def test_a_stock_plan_names_no_plug_in(layout_plan: Callable[..., Path], capsys) -> None:
    main(["flags", str(layout_plan("tp2:2,tp2:2 @4x1"))])
    text = capsys.readouterr().out
    assert "# Stock Megatron runs this plan" in text
    assert "megatron_hetero" not in text
    assert "hetero-" not in text


def test_line_style_is_one_command_for_each_node(layout_plan: Callable[..., Path], capsys) -> None:
    main(["flags", str(layout_plan()), "--style", "line"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert shlex.split(lines[0])[-2:] == ["--hetero-layout", "tp2:3,tp1:1 @4 | tp1:4 @2"]


def test_json(layout_plan: Callable[..., Path], capsys) -> None:
    assert main(["flags", str(layout_plan()), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["argv"] == ["--hetero-layout", "tp2:3,tp1:1 @4 | tp1:4 @2"]
    assert data["stock_megatron"] is False
    assert len(data["reasons_not_stock"]) == 3
    assert [node["node_rank"] for node in data["nodes"]] == [0]
    assert [(r["replica"], r["stage"], r["tensor_rank"]) for r in data["ranks"]] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    ]  # fmt: skip


def test_rank_table_is_aligned_comments(layout_plan: Callable[..., Path], capsys) -> None:
    main(["flags", str(layout_plan())])
    table = capsys.readouterr().out.split("# Which process is which part of the plan\n")[1]
    lines = table.splitlines()
    assert lines[0].split() == [
        "#",
        "rank",
        "host",
        "GPU",
        "type",
        "replica",
        "stage",
        "tensor",
        "rank",
    ]
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1


def test_a_port_out_of_range_is_refused(layout_plan: Callable[..., Path], capsys) -> None:
    assert main(["flags", str(layout_plan()), "--master-port", "80"]) == 2
    assert "master port 80" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a\nrm -rf x", "a\r\nb", "a\x1b[31m", "a\u2028b"])
def test_a_comment_stays_a_comment(text: str) -> None:
    line = comment(text)
    assert line.startswith("# ")
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_it_says_which_flags_of_the_script_are_missing(tmp_path: Path, capsys) -> None:
    """A script's `$DATA_PATH` is not known here; who pastes the output has to add it."""
    script = tmp_path / "gpt.sh\nrm -rf x"
    script.write_text(
        "DATA_PATH=$1\n"
        "python pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 32 --max-position-embeddings 32 --vocab-size 128 "
        "--micro-batch-size 1 --global-batch-size 6 --data-path $DATA_PATH\n"
    )
    layout = parse_layout("tp2:3,tp1:1 @4 | tp1:4 @2")
    save_plan(plan_from_layout(layout, load_workload(script)), tmp_path / "plan.json")
    assert main(["flags", str(tmp_path / "plan.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if line.startswith("# Model: ")]
    assert len(named) == 1
    assert "gpt.sh?rm -rf x" in named[0]
    (note,) = (line for line in lines if "--data-path is left out" in line)
    assert note.startswith("# NOTE: ")
    assert "DATA_PATH (line 1) depends on $1, which is an argument of the script" in note


def test_what_has_to_lie_on_every_machine_is_said(tmp_path: Path, capsys) -> None:
    plan = plan_from_layout(parse_layout("tp2:3,tp2:1 @4"), make_workload())
    placed = place_in_order(plan, CLUSTER)
    assert len(placed.hosts) > 1
    first = replace(placed.replicas[0].stages[0], num_launched_forwards=3)
    stages = (first, *placed.replicas[0].stages[1:])
    plan = replace(placed, replicas=(replace(placed.replicas[0], stages=stages),))
    save_plan(placed, tmp_path / "stock.json")
    save_plan(plan, tmp_path / "plan.json")
    assert main(["flags", str(tmp_path / "stock.json")]) == 0
    assert "copy the file" not in capsys.readouterr().out
    assert main(["flags", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "--hetero-plan" in shown and "copy the file to that path on each" in shown
    assert "# One line for each machine; start them all." in shown
    folder = tmp_path / "job"
    assert main(["launch", str(tmp_path / "plan.json"), "--for", "ssh", "-o", str(folder)]) == 0
    assert "to the same path on every machine" in " ".join(capsys.readouterr().out.split())


def test_flags_of_the_plan_name_every_node(plan_path: Path, capsys) -> None:
    assert main(["flags", str(plan_path), "--style", "line"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("#")]
    plan = load_plan(plan_path)
    assert len(lines) == len(plan.hosts)
    for host, line in zip(plan.hosts, lines, strict=True):
        assert f"--nproc-per-node {len(host.gpu_indices)} " in line
