"""What ranks must have in common: which flags count, and how a difference is said."""

from __future__ import annotations

from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.runtime.job.agreement import MAY_DIFFER, PATHS, disagreement, flag_items

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_order_spelling_defaults_and_places_do_not_count() -> None:
    one = flag_items(
        ["--lr", "1e-3", "--seed=5", "--swiglu", "--load=/x", "--data-path", "0.3", "a"]
    )
    other = flag_items(
        ["--swiglu", "--data-path", "0.30", "/mnt/b", "--seed=4", "--load", "/y", "--seed", "5",
         "--lr=0.001", "--lr-decay-style", "linear", "--num-workers=7"]
    )  # fmt: skip
    assert one == other


def test_weights_of_data_presence_and_a_scripts_own_flags_count() -> None:
    base = ["--data-path", "0.3", "a", "0.7", "b", "--own-flag", "3"]
    for changed in (
        ["--data-path", "0.4", "a", "0.6", "b", "--own-flag", "3"],
        ["--data-path", "0.3", "a", "--own-flag", "3"],
        ["--own-flag", "3"],
        ["--data-path", "0.3", "a", "0.7", "b", "--own-flag", "4"],
        [*base, "--load", "x"],
    ):
        assert flag_items(base) != flag_items(changed)


def test_opposite_flags_of_one_setting_differ() -> None:
    assert flag_items(["--no-masked-softmax-fusion"]) != flag_items([])


def test_lists_name_flags_of_megatron() -> None:
    known = flag_table().by_name
    assert [name for name in PATHS if name not in known] == []
    assert [n for n in MAY_DIFFER if n not in known and not n.startswith("--hetero-")] == []


def test_the_rank_that_stands_alone_comes_first() -> None:
    items = {rank: {"--lr": "0.1"} for rank in range(4)}
    items[2] = {"--lr": "0.2", "--swiglu": "--swiglu"}
    assert disagreement(items, HOSTS).splitlines() == [
        "--lr: rank 2 on b: 0.2; ranks 0, 1, 3: 0.1",
        "  --swiglu: rank 2 on b: --swiglu; ranks 0, 1, 3: not given",
    ]


def test_long_values_are_cut_at_the_first_difference() -> None:
    long = "tp1:1," * 200
    items = {
        0: {"layout of the plan": long + "tp1:2 @4"},
        1: {"layout of the plan": long + "tp2:2 @4"},
    }
    said = disagreement(items, HOSTS)
    assert "tp1:2 @4" in said and "tp2:2 @4" in said and len(said) < 300
