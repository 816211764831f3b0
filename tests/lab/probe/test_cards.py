"""Which cards a probe measures, and the paths between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.measurements import LinkFit
from megatron_hetero.errors import EnvironmentMismatchError, HeteroError, UsageError
from megatron_hetero.lab.probe.cards import cards_at, cards_of, chosen_cards, only
from megatron_hetero.lab.probe.pairs import machine_lines

BUS = ["00000000:01:00.0", "00000000:41:00.0", "00000000:c1:00.0"]
RTX_3090, RTX_4090 = "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090"
# CUDA has the fastest card first; on the bus it stands between the others.
CARDS = cards_of([RTX_4090, RTX_3090, RTX_3090], "012", [BUS[1], BUS[0], BUS[2]], BUS)


def test_cards_have_the_numbers_of_the_bus() -> None:
    assert [(card.place, card.name, card.word) for card in CARDS] == [
        (0, RTX_3090, "1"),
        (1, RTX_4090, "0"),
        (2, RTX_3090, "2"),
    ]
    # A part of the machine keeps its places; without a list of all, what is seen is numbered.
    seen = [RTX_3090, RTX_4090], ["7", "5"], [BUS[2], BUS[1]]
    assert [(c.place, c.word) for c in cards_of(*seen, BUS)] == [(1, "5"), (2, "7")]
    assert [(c.place, c.word) for c in cards_of(*seen, ())] == [(0, "5"), (1, "7")]
    assert [c.name for c in cards_of([RTX_4090, RTX_3090], "01", (), ())] == [RTX_4090, RTX_3090]


def test_a_type_is_measured_on_its_own_cards_alone() -> None:
    assert only(chosen_cards(CARDS, "RTX-4090", None)) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert only(chosen_cards(CARDS, "RTX-3090", None)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert only(chosen_cards(CARDS, "RTX-3090", [2])) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert only(chosen_cards(CARDS, "my-4090", [1])) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert chosen_cards((), "my-cpu", None) == (), "a CPU stands for a type of the user's own"
    alike = [card for card in CARDS if card.name == RTX_3090]
    assert chosen_cards(alike, "my-3090", None) == tuple(alike)


@pytest.mark.parametrize(
    ("gpu", "places", "kind", "words"),
    [
        ("A100-40GB", None, EnvironmentMismatchError, "has none; it has card 0 .*RTX 3090"),
        ("RTX-3090", [0, 1], UsageError, "card 1 .*RTX 4090.* is another type"),
        ("my-own", None, UsageError, "a probe is of one type; say with --cards which"),
        ("my-own", [0, 1], UsageError, "a probe is of one type"),
        ("RTX-3090", [3], UsageError, "--cards 3: this machine has card 0"),
    ],
)
def test_what_is_not_one_type_is_refused(
    gpu: str, places: list[int] | None, kind: type[HeteroError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        chosen_cards(CARDS, gpu, places)


def test_a_cpu_is_not_measured_under_the_name_of_a_gpu() -> None:
    with pytest.raises(EnvironmentMismatchError, match=r"sees no GPU .* --gpu my-cpu"):
        chosen_cards((), "RTX-4090", None)


def test_no_card_where_torch_sees_none() -> None:
    with pytest.raises(UsageError, match="no GPU that torch sees"):
        cards_at((), [0])


def test_measured_paths_are_lines_that_load(tmp_path: Path) -> None:
    """Paths that differ by what measurements scatter are one kind, a bridge is its own."""
    found = {
        (0, 1): LinkFit(14e-6, 11.8e9, 0.02),
        (0, 2): LinkFit(16e-6, 12.3e9, 0.02),
        (1, 2): LinkFit(7.5e-6, 51e9, 0.02),
    }
    lines = list(machine_lines(found))
    assert lines == [
        "link: {bandwidth: 12.1 GB/s, latency: 15 us}",
        "pairs:",
        "  - {cards: [1, 2], bandwidth: 51 GB/s, latency: 7.5 us}",
    ]
    path = tmp_path / "cluster.yaml"
    head = ["version: 1", "nodes:", "  - name: box"]
    gpus = "gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]"
    path.write_text("\n".join([*head, *(f"    {line}" for line in [gpus, *lines])]))
    cluster = load_cluster(path)
    assert cluster.node_by_name["box/RTX-3090"].link.bytes_per_s == 51e9
    assert cluster.node_links["box/RTX-4090", "box/RTX-3090"].bytes_per_s == 12.1e9
    assert list(machine_lines({(0, 1): found[0, 1]})) == [
        "link: {bandwidth: 11.8 GB/s, latency: 14 us}"
    ]


def test_every_two_of_three_processes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--pairs", "--gpus", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["cards"] for each in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(each["bytes_per_s"] > 0 for each in found["pairs"])
    assert found["cluster_yaml"][0].startswith("link: {bandwidth: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pairs", "--gpus", "1"], "--pairs needs two cards"),
        (["--pairs", "--cards", "0"], "--cards 0: this machine has no GPU that torch sees"),
        (["--model", "nothing.sh"], "--gpu NAME is missing"),
    ],
)
def test_the_command_says_what_is_missing(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *argv]) == 2
    assert words in capsys.readouterr().err
