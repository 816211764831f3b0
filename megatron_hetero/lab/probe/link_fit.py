"""GenModel's constants of links, fitted to measured exchanges (arXiv 2409.04202).

An exchange of S bytes takes `A alpha + S (B beta + C gamma + D delta + max(w - w_t, 0) B eps)`: A
rounds, B times the buffer on the busiest link, C of it added and D accessed by a device, w senders
to one receiver at once (`exchange.terms.term_counts`).  All constants are at least 0; the threshold
w_t is the whole number that fits best.  Errors are relative, so that small buffers count like large
ones.  The simpler model beside it, alpha-beta-gamma, has neither delta nor eps.

An all-reduce has B = 2 C whatever its plan, so beta and gamma can be told apart only where
reduce-scatters and all-gathers were measured by themselves; rings access 3 bytes for each one
added, so gamma and delta only where some plan adds several pieces at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from megatron_hetero.errors import FileFormatError
from megatron_hetero.exchange.terms import TermCounts

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredExchange:
    """An exchange of a buffer of `num_bytes` among equal holders, and its median seconds."""

    name: str
    num_holders: int
    num_bytes: int
    counts: TermCounts
    seconds: float


@dataclass(frozen=True)
class GenModelFit:
    """Constants of GenModel: seconds for a round, and for each byte sent, added, accessed, or sent
    by each sender above `num_senders` that one receiver hears from at once."""

    round_s: float
    sent_s_per_byte: float
    added_s_per_byte: float
    accessed_s_per_byte: float
    incast_s_per_byte: float
    num_senders: int

    def seconds(self, found: MeasuredExchange) -> float:
        """Predict the seconds of an exchange by its counts."""
        row = _row(found, self.num_senders)
        return float(row @ self._constants)

    @property
    def _constants(self) -> Floats:
        return np.array(
            [
                self.round_s,
                self.sent_s_per_byte,
                self.added_s_per_byte,
                self.accessed_s_per_byte,
                self.incast_s_per_byte,
            ]
        )

    def errors(self, measured: Sequence[MeasuredExchange]) -> Floats:
        """Return the relative error of each prediction, shape [measured]; above 0 is too long."""
        return np.array([self.seconds(found) / found.seconds - 1 for found in measured])

    def cluster_lines(self) -> Iterator[str]:
        """Yield lines of cluster.yaml for a link, without what costs nothing."""
        yield "link:"
        yield f"  bandwidth: {1e-9 / self.sent_s_per_byte:.3g} GB/s"
        yield f"  latency: {max(self.round_s * 1e6, 0.1):.4g} us"
        if self.accessed_s_per_byte:
            yield f"  reduce_bandwidth: {1e-9 / self.accessed_s_per_byte:.3g} GB/s"
        if self.incast_s_per_byte:
            slowdown = self.incast_s_per_byte / self.sent_s_per_byte
            yield f"  incast: {{senders: {self.num_senders}, slowdown: {slowdown:.2g}}}"


@dataclass(frozen=True)
class HeldOut:
    """Errors of both models on sizes left out of the fit, as parts of the seconds."""

    genmodel: Floats
    simpler: Floats


_ALL = (0, 1, 2, 3, 4)
_SIMPLER = (0, 1, 2)
_OF_A_CLUSTER_FILE = (0, 1, 3, 4)
"""A cluster file has a single rate for adding, the memory's: `reduce_bandwidth`."""


def fit_genmodel(measured: Sequence[MeasuredExchange]) -> GenModelFit:
    """Fit all five constants and the threshold.

    Raises:
        FileFormatError: fewer than two sizes, or seconds from which no bandwidth follows.
    """
    return _fit(measured, _ALL)


def fit_for_cluster_file(measured: Sequence[MeasuredExchange]) -> GenModelFit:
    """Fit the constants that a link of cluster.yaml has: additions count as memory accesses.

    Raises:
        FileFormatError: fewer than two sizes, or seconds from which no bandwidth follows.
    """
    return _fit(measured, _OF_A_CLUSTER_FILE)


def held_out(measured: Sequence[MeasuredExchange]) -> HeldOut:
    """Fit GenModel and alpha-beta-gamma to every second size, and predict the others.

    Raises:
        FileFormatError: fewer than four sizes.
    """
    # Every second size is fitted, so that most of the others lie between fitted ones.
    sizes = sorted({found.num_bytes for found in measured})
    if len(sizes) < 4:
        raise FileFormatError(
            f"exchanges of {len(sizes)} sizes cannot be halved; measure at least 4 sizes"
        )
    fitted = [found for found in measured if found.num_bytes in sizes[::2]]
    others = [found for found in measured if found.num_bytes in sizes[1::2]]
    return HeldOut(_fit(fitted, _ALL).errors(others), _fit(fitted, _SIMPLER).errors(others))


def _fit(measured: Sequence[MeasuredExchange], columns: Sequence[int]) -> GenModelFit:
    if len({found.num_bytes for found in measured}) < 2:
        raise FileFormatError("a fit of links needs exchanges of at least two sizes")
    # The threshold is a whole number with few values: all are tried.
    best = min(_fits(measured, columns), key=lambda found: found[0])[1]
    if not best.sent_s_per_byte:
        raise FileFormatError(
            "larger buffers did not take longer, so no bandwidth follows; measure larger ones"
        )
    return best


def _fits(
    measured: Sequence[MeasuredExchange], columns: Sequence[int]
) -> Iterator[tuple[float, GenModelFit]]:
    """Yield (squared relative error, fit) for every threshold that tells exchanges apart."""
    seconds = np.array([found.seconds for found in measured])
    most = max(found.counts.num_senders for found in measured)
    # Also where no receiver hears from two senders, one threshold is tried.
    for num_senders in range(1, max(most, 2)):
        rows = np.array([_row(found, num_senders) for found in measured])[:, columns]
        # Errors are relative: every row aims at 1.
        rows /= seconds[:, None]
        # Columns of one length: bytes and rounds differ by many orders of magnitude.
        length = np.linalg.norm(rows, axis=0)
        length[length == 0] = 1.0
        found, residual = nnls(rows / length, np.ones(len(rows)))
        constants = np.zeros(len(_ALL))
        constants[list(columns)] = found / length
        round_s, sent, added, accessed, incast = map(float, constants)
        fit = GenModelFit(round_s, sent, added, accessed, incast, num_senders)
        yield residual**2, fit
        # Without the column of incast all thresholds give the same fit.
        if 4 not in columns:
            return


def _row(found: MeasuredExchange, num_senders: int) -> Floats:
    """Return what each constant is multiplied by, shape [5]."""
    counts, size = found.counts, found.num_bytes
    excess = max(counts.num_senders - num_senders, 0) * counts.sent
    return np.array(
        [
            counts.num_rounds,
            counts.sent * size,
            counts.added * size,
            counts.accessed * size,
            excess * size,
        ]
    )
