"""Lengths of sequences, and files of lengths.

A file has a length in tokens on each line, or a length and how many there are of it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hetero.errors import FileFormatError
from megatron_hetero.files import read_text

_MOST_TOKENS = 1 << 30
_MOST_SEQUENCES = 100_000_000
_MOST_BYTES = 256 << 20
"""A longer list is shorter as lengths with their counts; a data set is no list of lengths."""


@dataclass(frozen=True)
class Lengths:
    """How many sequences there are of each length: `counts[i]` of `tokens[i]`, ascending."""

    tokens: tuple[int, ...]
    counts: tuple[int, ...]
    source: str

    @property
    def num_sequences(self) -> int:
        """Count the sequences."""
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all sequences."""
        return sum(t * c for t, c in zip(self.tokens, self.counts, strict=True))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest."""
        return self.tokens[-1]

    def part_below(self, limit: int) -> float:
        """Return the part of the sequences with fewer than `limit` tokens."""
        below = sum(c for t, c in zip(self.tokens, self.counts, strict=True) if t < limit)
        return below / self.num_sequences

    def quantile(self, part: float) -> int:
        """Return the least length that `part` of the sequences are not longer than."""
        # The tolerance keeps a part such as 0.9 of 10 sequences from needing a tenth one.
        wanted, seen = part * self.num_sequences, 0
        for tokens, count in zip(self.tokens, self.counts, strict=True):
            seen += count
            if seen >= wanted - 1e-9:
                return tokens
        return self.longest

    def batch(self, num_sequences: int, seed: int) -> list[int]:
        """Draw sequences, each length as often as the file has it; without any twice where there
        are enough.

        Args:
            num_sequences: of the batch.
            seed: equal ones draw alike.
        """
        chance = np.random.default_rng(seed)
        # Sequences are numbered through all lengths; length i ends before number `ends[i]`.
        ends = np.cumsum(self.counts)
        numbers = chance.choice(int(ends[-1]), num_sequences, replace=num_sequences > int(ends[-1]))
        return [self.tokens[int(i)] for i in np.searchsorted(ends, numbers, side="right")]


def read_lengths(path: Path) -> Lengths:
    """Read a file of lengths; empty lines and what follows a `#` are left out.

    Raises:
        FileFormatError: there is no such file, or a line is not one or two whole numbers of a
            sensible size.
    """
    # A length a line, or a length and how often it comes.
    found: dict[int, int] = {}
    for number, line in enumerate(io.StringIO(read_text(path, _MOST_BYTES), newline=None), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        if len(words) > 2 or not all(word.isascii() and word.isdigit() for word in words):
            raise FileFormatError(
                f'{where}: "{line.strip()[:60]}" is not a length in tokens, or a length and how '
                "many sequences have it; write for example 1024 or 1024 17"
            )
        if max(map(len, words)) > 12:
            raise FileFormatError(f"{where}: a number has at most 12 digits")
        tokens, count = int(words[0]), int(words[1]) if len(words) == 2 else 1
        if not 1 <= tokens <= _MOST_TOKENS:
            raise FileFormatError(f"{where}: {tokens} tokens; allowed are 1 to {_MOST_TOKENS}")
        if count < 1:
            raise FileFormatError(f"{where}: {count} sequences of {tokens} tokens; at least 1")
        found[tokens] = found.get(tokens, 0) + count
    # At least one, and not more than can be dealt.
    if not found:
        raise FileFormatError(f"{path}: there is no length in it")
    if sum(found.values()) > _MOST_SEQUENCES:
        raise FileFormatError(f"{path}: more than {_MOST_SEQUENCES} sequences")
    tokens_of = tuple(sorted(found))
    return Lengths(tokens_of, tuple(found[t] for t in tokens_of), str(path))
