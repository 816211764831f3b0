"""Made-up lengths of sequences, and files of lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.sequences.lengths import Lengths

HEADER = "# tokens  documents"


def lengths_of(tokens: Sequence[int], source: str) -> Lengths:
    """Count the sequences of each length."""
    values, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    return Lengths(tuple(map(int, values)), tuple(map(int, counts)), source)


def written_lengths(lengths: Lengths) -> str:
    """Write lengths as a file that `read_lengths` reads."""
    pairs = zip(lengths.tokens, lengths.counts, strict=True)
    return "\n".join([HEADER, *(f"{tokens} {count}" for tokens, count in pairs)]) + "\n"


@dataclass(frozen=True)
class Distribution:
    """A log-normal body with a heavy tail, cut at `longest`: `tail` of the sequences are drawn from
    a Pareto law of index `index` that begins at `tail_from` tokens."""

    name: str
    median: float
    spread: float
    tail: float
    tail_from: float
    index: float
    longest: int

    def drawn(self, num_sequences: int, seed: int) -> list[int]:
        """Draw lengths in tokens, equal ones for equal seeds."""
        chance = np.random.default_rng(seed)
        body = np.exp(chance.normal(math.log(self.median), self.spread, num_sequences))
        # A Pareto law that is cut, not clipped: no heap at the longest.
        # The distribution function of the Pareto law at `longest`.
        high = 1 - (self.tail_from / self.longest) ** self.index
        # The law's inverse at a uniform number below `high`.
        far = self.tail_from * (1 - chance.random(num_sequences) * high) ** (-1 / self.index)
        chosen = np.where(chance.random(num_sequences) < self.tail, far, body)
        return [int(v) for v in np.clip(chosen.round(), 16, self.longest)]


DISTRIBUTIONS: Mapping[str, Distribution] = {
    made.name: made
    for made in (
        Distribution("web", 900.0, 1.2, 0.05, 8192.0, 1.3, 320 * 1024),
        Distribution("books-and-web", 1500.0, 1.1, 0.04, 8192.0, 0.9, 256 * 1024),
        Distribution("code", 700.0, 1.45, 0.055, 8192.0, 1.1, 288 * 1024),
    )
}
"""Made-up distributions with the shape of published corpora: most sequences are short, a few are
very long."""
