"""A machine with unlike cards through the verbs: its cards are always called `machine:index`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.plan.file import load_plan
from megatron_hetero.report.page.cluster_map import cluster_map

BOX = """\
version: 1
nodes:
  - name: box
    gpus:
      - {type: RTX-4090, count: 1}
      - {type: RTX-3090, count: 2}
    link: {bandwidth: 12 GB/s, latency: 12 us}
    pairs:
      - {cards: [1, 2], bandwidth: 40 GB/s, latency: 5 us}
"""
MODEL = (
    "--num-layers=8", "--hidden-size=1024", "--num-attention-heads=16", "--seq-length=1024",
    "--max-position-embeddings=1024", "--micro-batch-size=1", "--global-batch-size=16", "--bf16",
    "--vocab-size=32000", "--train-iters=9", "--lr=1e-4", "--mock-data",
    "--tokenizer-type=NullTokenizer", "--eval-interval=9",
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cluster.yaml and the plan that `plan` makes for it."""
    path = tmp_path_factory.mktemp("box")
    (path / "cluster.yaml").write_text(BOX)
    words = ["plan", f"--cluster={path / 'cluster.yaml'}", f"--output={path / 'plan.json'}"]
    assert main([*words, "--", *MODEL]) == 0
    return path


def test_the_plan_names_cards_of_the_machine(folder: Path) -> None:
    plan = load_plan(folder / "plan.json")
    (host,) = plan.hosts
    assert host.node == "box"
    types = {"box:0": "RTX-4090", "box:1": "RTX-3090", "box:2": "RTX-3090"}
    assert plan.type_by_device == types
    assert "box/" not in (folder / "plan.json").read_text()


@pytest.mark.parametrize("verb", ["explain", "validate", "simulate", "doctor", "flags"])
def test_no_verb_shows_an_islands_inner_name(verb: str, folder: Path, capsys) -> None:
    words = [verb, str(folder / "plan.json")]
    if verb != "flags":
        words.append(f"--cluster={folder / 'cluster.yaml'}")
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "box" in shown.out or verb == "doctor"  # which found nothing to name
    assert "box/" not in shown.out + shown.err


def test_the_report_draws_one_box_with_all_its_cards(folder: Path) -> None:
    page = folder / "report.html"
    cluster = f"--cluster={folder / 'cluster.yaml'}"
    assert main(["report", str(folder / "plan.json"), cluster, f"--output={page}"]) == 0
    assert "box/" not in page.read_text()
    figure = cluster_map(load_plan(folder / "plan.json"), load_cluster(folder / "cluster.yaml"))
    root = ET.fromstring(figure.standalone())
    cards = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "card"]
    assert len(cards) == 1
    words = [e.text or "" for e in root.iter(f"{SVG}text")]
    assert {"box", "3 GPUs", "1 x RTX-4090", "2 x RTX-3090, 40 GB/s between them"} <= set(words)
    titles = " ".join(e.text or "" for e in root.iter(f"{SVG}title"))
    assert all(f"box:{i}:" in titles for i in range(3))


@pytest.mark.parametrize(
    ("launcher", "words", "says"),
    [
        ("slurm", [], "#SBATCH --gpus-per-node=3"),
        ("kubernetes", ["--image=registry.example/hetero:1"], "nvidia.com/gpu: 3"),
        ("ssh", [], "NCCL_P2P_LEVEL:-NVL"),
    ],
)
def test_launchers_ask_for_all_cards_of_the_machine(
    launcher: str, words: list[str], says: str, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "job"
    given = [f"--for={launcher}", str(folder / "plan.json"), f"--output={output}", *words]
    assert main(["launch", *given]) == 0
    text = "".join(path.read_text() for path in sorted(output.rglob("*")) if path.is_file())
    assert says in text and "CUDA_VISIBLE_DEVICES=0,1,2" in text
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in text and "box/" not in text


def test_skypilot_cannot_ask_for_unlike_cards(folder: Path, tmp_path: Path, capsys) -> None:
    words = ["--for=skypilot", str(folder / "plan.json"), f"--output={tmp_path / 'job'}"]
    assert main(["launch", *words, "--image=registry.example/hetero:1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "machine box has unlike GPUs (1 x RTX-4090 + 2 x RTX-3090)" in said


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("count: 1}", "count: 0}", 5, "count"),
        ("cards: [1, 2]", "cards: [1, 3]", 9, "machine box has no card 3; it has 3 (0-2)"),
        ("cards: [1, 2]", "cards: [1, 1]", 9, "a card stands here twice"),
        ("type: RTX-4090", "type: MI300X", 4, "are in one machine"),
        ("type: RTX-4090", "type: RTX-4099", 5, "RTX-4099"),
    ],
)
def test_faults_are_named_with_their_place(
    old: str, new: str, line: int, words: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(BOX.replace(old, new))
    assert main(["plan", f"--cluster={path}", "--", *MODEL]) == 4
    said = capsys.readouterr().err
    flat = said.replace("\n", "")
    assert f"cluster.yaml:{line}" in flat, said
    assert words.replace(" ", "") in flat.replace(" ", ""), said
