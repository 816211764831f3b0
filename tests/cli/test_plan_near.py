"""`plan --near`: planning again near an old plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_hetero.cli.main import main
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout
from tests.cli.example import MODEL


def test_planning_again_for_a_script_that_may_hold_more_flags_ends_with_1(
    small: tuple[Path, Path], tmp_path: Path, capsys
) -> None:
    cluster, old = small
    workload = load_plan(old).workload
    assert workload is not None
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun pretrain_gpt.py {' '.join(workload.megatron_args)} $MORE\n")
    words = ["plan", "--cluster", str(cluster), "--near", str(old), "--model", str(path)]
    assert main(words) == 1
    assert "NOT ALL OF THE SCRIPT IS KNOWN" in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    assert "MORE" in " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert main([*words, "--model-env", "MORE="]) == 0


def test_planning_again_near_an_old_plan(small: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    cluster, old = small
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(cluster.read_text().replace("count: 2", "count: 1"))
    path = tmp_path / "after.json"
    words = ["plan", "--cluster", str(smaller), "--near", str(old), "-o", str(path)]
    words += ["--store-bandwidth", "1 GB/s", "--steps", "100"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    way = shown["ways"][shown["chosen"]]
    assert shown["layout"] == way["layout"] == format_layout(load_plan(path).layout)
    assert all(w["moved_bytes"] >= 0 and w["move_s"] is not None for w in shown["ways"])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Ways to go on" in out and "to fetch" in out and "a step took" in out
    assert max(map(len, out.splitlines())) <= 100
    for bad, message in (
        (["--near", str(old), "--store-bandwidth", "5"], "--store-bandwidth: .* without a"),
        (["--prefer", "near", "--model", MODEL], "--prefer goes with --near"),
    ):
        assert main(["plan", "--cluster", str(smaller), *bad]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert main([*words, "--", "--num-layers", "10"]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "does not add them to the old plan's: give its script by --model too." in said
    assert "--hidden-size" in said


def test_planning_again_keeps_and_takes_precisions_of_stages(tmp_path: Path) -> None:
    """V100 have no bf16: only stages in precisions of their own use one."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "version: 1\n"
        "nodes: [{name: a, gpu: A100-80GB, count: 1}, {name: v, gpu: V100-32GB, count: 2}]\n"
        "links: {inside_node: {V100-32GB: {bandwidth: 40 GB/s, latency: 9 us}},\n"
        "        between_nodes: {bandwidth: 100 Gb/s, latency: 9 us}}\n"
    )
    again = ["plan", "--cluster", str(cluster), "--near"]
    new = ["plan", "--cluster", str(cluster), "--model", MODEL, "-o"]
    few, mixed = ["--", "--num-layers", "8"], ["--stage-precision", "mixed"]
    one, both, found = (tmp_path / f"{name}.json" for name in ("one", "both", "found"))
    assert main([*new, str(one), *few]) == 0
    assert main([*new, str(both), *mixed, *few]) == 0

    def uses_all() -> bool:
        return not load_plan(found).idle_devices

    # Asked for; and kept, though the model is read anew.
    assert main([*again, str(one), "-o", str(found), *mixed]) == 0 and uses_all()
    words = [*again, str(both), "-o", str(found), "--model", MODEL, *few]
    assert main(words) == 0 and uses_all()
    assert main([*again, str(one), "-o", str(found)]) == 0 and not uses_all()


def test_planning_again_says_what_the_plan_changes_and_what_the_file_doubts(
    small: tuple[Path, Path], tmp_path: Path, capsys
) -> None:
    cluster = tmp_path / "cluster.yaml"
    text = small[0].read_text()
    cluster.write_text(text.replace("gpu: RTX-4090,", "gpu: RTX-4090, root_complex: 9 GB/s,"))
    words = ["plan", "--cluster", str(cluster), "--near", str(small[1])]
    assert main([*words, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) > 1 and "root_complex: it counts between unlike cards" in notes[-1]
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(note.split()) in out for note in notes)
