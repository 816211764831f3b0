"""Files and distributions of lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import FileFormatError
from megatron_hetero.sequences import lengths
from megatron_hetero.sequences.lengths import read_lengths
from tools.drawn_lengths import DISTRIBUTIONS, Distribution, lengths_of, written_lengths


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("# by hand\n30\n\n7 2   # two\n30 3\n", encoding="utf-8")
    found = read_lengths(path)
    assert (found.tokens, found.counts) == ((7, 30), (2, 4))
    assert (found.num_sequences, found.num_tokens, found.longest) == (6, 134, 30)
    assert found.quantile(0.3) == 7 and found.quantile(0.5) == 30
    assert found.part_below(30) == pytest.approx(1 / 3)
    path.write_text(written_lengths(found), encoding="utf-8")
    assert read_lengths(path) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no length"),
        ("12 a", r"lengths.txt:1: .*not a length"),
        ("5\n-3", r":2: .*not a length"),
        ("1 2 3", "not a length"),
        ("0", "0 tokens; allowed are 1"),
        ("5 0", "0 sequences"),
        ("9" * 40, "12 digits"),
        ("99999999999", "allowed"),
        ("5 999999999999", "more than"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=message):
        read_lengths(path)


def test_a_missing_file_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_lengths(tmp_path / "none.txt")
    (tmp_path / "bin.txt").write_bytes(b"\xff\x00")
    with pytest.raises(FileFormatError, match="byte 0xff is not UTF-8 text"):
        read_lengths(tmp_path / "bin.txt")


@pytest.mark.parametrize("made", DISTRIBUTIONS.values(), ids=lambda d: d.name)
def test_most_sequences_are_short_and_the_longest_very_long(made: Distribution) -> None:
    drawn = lengths_of(made.drawn(100_000, 0), made.name)
    assert 0.895 <= drawn.part_below(8192) <= 0.935
    assert 0.9 * made.longest <= drawn.longest <= made.longest
    assert made.drawn(50, 1) == made.drawn(50, 1) != made.drawn(50, 2)


def test_batches_are_drawn_as_often_as_the_file_has_them() -> None:
    lengths = lengths_of([5] * 30 + [9] * 10, "here")
    assert sorted(lengths.batch(40, 1)) == [5] * 30 + [9] * 10
    assert lengths.batch(12, 1) == lengths.batch(12, 1)
    assert len(lengths.batch(100, 1)) == 100


def test_a_file_without_an_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/zero has a size of 0, and is longer than any memory."""
    monkeypatch.setattr(lengths, "_MOST_BYTES", 1 << 20)
    with pytest.raises(FileFormatError, match="/dev/zero:1: larger than 1048576 bytes"):
        read_lengths(Path("/dev/zero"))
