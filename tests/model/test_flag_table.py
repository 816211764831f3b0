"""The flag table: equal to the real parser, and splitting as argparse does."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import UsageError
from megatron_hetero.files import read_json
from megatron_hetero.model.flag_table import TABLE_PATH, Flag, flag_table, last_of_each

TABLE = flag_table()


def make_flag_table() -> ModuleType:
    """The tool, which is a script and not part of the package."""
    path = Path(__file__).parents[2] / "tools" / "make_flag_table.py"
    spec = importlib.util.spec_from_file_location("make_flag_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_table_is_that_of_the_real_parser() -> None:
    assert read_json(TABLE_PATH).data == make_flag_table().flag_table_data()


def test_the_table_knows_flags_by_every_name() -> None:
    assert len(TABLE.flags) > 800
    flag = TABLE.by_name["--num-layers"]
    assert (flag.dest, flag.type, flag.bounds) == ("num_layers", "int", (1, 1))
    boolean = next(flag for flag in TABLE.flags if flag.action == "boolean")
    assert len(boolean.names) == 2
    assert "auto" in (TABLE.by_name["--attention-backend"].choices or ())


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        (["--lr", "1e-4", "--bf16"], ["--lr 1e-4", "--bf16"]),
        (["--lr=1e-4"], ["--lr 1e-4"]),
        (["--lr", "-1"], ["--lr=-1"]),
        (["--lr=-1"], ["--lr=-1"]),
        (["--data-path", "a", "b", "--bf16"], ["--data-path a b", "--bf16"]),
        (["--rampup-batch-size", "2", "2", "64"], ["--rampup-batch-size 2 2 64"]),
        (["--data-path="], ["--data-path "]),
        (["--split", "a=b"], ["--split a=b"]),
        ([], []),
    ],
)
def test_split(argv: list[str], tokens: list[str]) -> None:
    assert [" ".join(option.tokens) for option in TABLE.split(argv)] == tokens


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num-layer", "3"], r"--num-layer is not a flag of Megatron 0\.19.*--num-layers"),
        (["3"], "'3' is not a flag"),
        (["-h"], "'-h' is not a flag"),
        (["--"], "-- is not a flag of Megatron"),
        (["--bf16", "yes"], "'yes' is not a flag"),
        (["--bf16=yes"], r"--bf16 takes 0 value\(s\), not 1"),
        (["--num-layers"], r"--num-layers takes 1 value\(s\), not 0"),
        (["--num-layers", "--bf16"], r"--num-layers takes 1 value\(s\), not 0"),
        (["--num-layers", "x"], "--num-layers: 'x' is not of type int"),
        (["--lr", "fast"], "--lr: 'fast' is not of type float"),
        (["--rampup-batch-size", "2", "2"], r"takes 3 value\(s\), not 2"),
        (["--recompute-granularity", "some"], "'some' is not among full, selective"),
        (["--attention-backend", "magic"], "'magic' is not among flash, fused"),
    ],
)
def test_what_megatron_would_refuse_is_refused(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TABLE.split(argv)


def test_a_value_that_reads_like_a_flag_cannot_stand_in_a_list() -> None:
    option = TABLE.option("--data-path", "a", "-b")
    with pytest.raises(UsageError, match="--data-path a -b: a value that begins with '-'"):
        _ = option.tokens


def test_the_last_of_equal_flags_wins() -> None:
    options = TABLE.split(["--lr", "1", "--bf16", "--lr", "2"])
    assert [str(option) for option in last_of_each(options)] == ["--bf16", "--lr 2"]


def stored(flag: Flag) -> st.SearchStrategy[list[str]]:
    """A flag with values that fit it, each way of writing them."""
    if flag.choices is not None:
        values = st.sampled_from([str(choice) for choice in flag.choices])
    elif flag.type == "int":
        values = st.integers(-5, 99).map(str)
    elif flag.type == "float":
        values = st.sampled_from(["1e-4", "0.5", "-1.5", "3"])
    else:
        values = st.sampled_from(["x", "a b", "k=v", "*", "$HOME", "'", "-7"])
    fewest, most = flag.bounds
    lists = st.lists(values, min_size=fewest, max_size=fewest + 2 if most is None else most)
    separate = lists.map(lambda found: [flag.names[0], *found])
    joined = values.map(lambda value: [f"{flag.names[0]}={value}"])
    return separate | joined if most == 1 or most is None else separate


PLAIN_FLAGS = [
    flag
    for flag in TABLE.flags
    if flag.action != "store" or flag.type in (None, "int", "float", "str") or flag.choices
]


@given(st.lists(st.sampled_from(PLAIN_FLAGS).flatmap(stored), max_size=6))
def test_split_and_tokens_mean_what_argparse_reads(arguments: list[list[str]]) -> None:
    argv = [token for argument in arguments for token in argument]
    try:
        rewritten = [t for o in last_of_each(TABLE.split(argv)) for t in o.tokens]
    except UsageError as error:
        assert "cannot stand in a list" in str(error)
        return
    parser = plain_parser()
    assert parser.parse_args(rewritten) == parser.parse_args(argv)
    assert not any(t.startswith("-") and not t.startswith("--") for t in rewritten)


def plain_parser() -> argparse.ArgumentParser:
    """argparse with the table's flags, so that this test needs no Megatron."""
    types = {"int": int, "float": float, "str": str, None: None}
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in PLAIN_FLAGS:
        if flag.action == "store":
            parser.add_argument(
                *flag.names,
                dest=flag.dest,
                nargs=flag.nargs,
                type=types.get(flag.type, str),
                choices=flag.choices,
            )
        elif flag.action == "boolean":
            parser.add_argument(
                flag.names[0], dest=flag.dest, action=argparse.BooleanOptionalAction
            )
        else:
            parser.add_argument(*flag.names, dest=flag.dest, action=flag.action)
    return parser


def test_the_known_part_leaves_out_a_scripts_own_flags_with_their_values() -> None:
    argv = ["--of-it", "3", "-1", "--num-layers", "4", "--its=2", "--lr=-1", "--swiglu", "--own"]
    assert flag_table().known_part(argv) == ("--num-layers", "4", "--lr=-1", "--swiglu")
