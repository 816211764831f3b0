"""Agreement and reports of the ranks of a preflight, beside the groups under test.

Everything goes through torch's key-value store, so that a group that hangs can still be reported.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_hetero.preflight.finding import Finding

_POLL_S = 0.01


@dataclass(frozen=True)
class Meeting:
    """Meeting of `size` ranks through a store of torch's (`FileStore`, `TCPStore`)."""

    store: Any
    rank: int
    size: int

    def publish(self, key: str, text: str) -> None:
        """Put a text under this rank's own key."""
        self.store.set(f"{key}/{self.rank}", text)

    def gather(self, key: str, limit_s: float) -> dict[int, str]:
        """Collect the texts published under `key` within the limit; late ranks are missing."""
        # Polled, because a store's own wait ends in an error and loses the texts that came.
        deadline = time.monotonic() + limit_s
        found: dict[int, str] = {}
        while len(found) < self.size:
            for rank in range(self.size):
                if rank not in found and self.store.check([f"{key}/{rank}"]):
                    found[rank] = self.store.get(f"{key}/{rank}").decode()
            if len(found) < self.size:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        return found

    def arrive(self, key: str, limit_s: float, patience_s: float) -> bool:
        """Wait until all ranks have arrived; return True if they have.

        The wait takes at most `limit_s`, and only `patience_s` after a report: a rank may be stuck.
        """
        self.store.set(f"arrived/{key}/{self.rank}", "1")
        # A counter beside the keys makes a poll one request, whatever the number of ranks.
        self.store.add(f"count/{key}", 1)
        start = time.monotonic()
        # Adding 0 reads a counter at once; `get` would wait for a key that is not there.
        while self.store.add(f"count/{key}", 0) < self.size:
            waited_s = time.monotonic() - start
            if waited_s > limit_s or (waited_s > patience_s and self.has_findings):
                return False
            time.sleep(_POLL_S)
        return True

    def absent(self, key: str) -> tuple[int, ...]:
        """Return the ranks that have not arrived at `key`."""
        return tuple(r for r in range(self.size) if not self.store.check([f"arrived/{key}/{r}"]))

    def report(self, finding: Finding) -> None:
        """Add a finding for rank 0."""
        # Numbers start at 1 and are unique, because the store itself adds.
        number = self.store.add("findings/count", 1)
        self.store.set(f"findings/{number}", json.dumps(asdict(finding)))

    @property
    def has_findings(self) -> bool:
        """Tell if any rank has reported a finding."""
        return bool(self.store.add("findings/count", 0) > 0)

    def findings(self) -> tuple[Finding, ...]:
        """Return all reported findings, each once, in the order of the reports."""
        names = [field.name for field in fields(Finding)]
        found = []
        for number in range(1, self.store.add("findings/count", 0) + 1):
            data = json.loads(self.store.get(f"findings/{number}").decode())
            found.append(Finding(**{name: data[name] for name in names}))
        return tuple(dict.fromkeys(found))
