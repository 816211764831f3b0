"""How many micro-batches each replica takes of the global batch."""

from __future__ import annotations

from collections.abc import Sequence


def share_micro_batches(
    num_micro_batches: int, fill_times_s: Sequence[float], periods_s: Sequence[float]
) -> tuple[int, ...] | None:
    """Shares that let all replicas end together; None when there are fewer than replicas.

    Replica r with m micro-batches takes `fill_times_s[r] + (m - 1) * periods_s[r]`.  Shares in
    proportion to speed (largest remainder), then single micro-batches move from the replica that
    ends last as long as that helps, which for such straight lines reaches the optimum.
    """
    num_replicas = len(periods_s)
    if num_micro_batches < num_replicas:
        return None
    speeds = [1 / period_s for period_s in periods_s]
    exact = [num_micro_batches * speed / sum(speeds) for speed in speeds]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(num_replicas), key=lambda r: (int(exact[r]) - exact[r], r))
    while sum(shares) < num_micro_batches:
        for r in by_remainder[: num_micro_batches - sum(shares)]:
            shares[r] += 1

    def end_s(replica: int, extra: int = 0) -> float:
        return fill_times_s[replica] + (shares[replica] + extra - 1) * periods_s[replica]

    while sum(shares) > num_micro_batches:
        shares[max((r for r in range(num_replicas) if shares[r] > 1), key=end_s)] -= 1
    while True:
        last = max(range(num_replicas), key=end_s)
        taker = min(range(num_replicas), key=lambda r: end_s(r, 1))
        if taker == last or shares[last] == 1 or end_s(taker, 1) >= end_s(last):
            return tuple(shares)
        shares[last] -= 1
        shares[taker] += 1
