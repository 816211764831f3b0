"""How soon the watch finds a fault, over many tries, with real processes on one machine.

python -m tests.runtime.detection_times --tries 20 killed
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.runtime.faults.test_watch import FLOOR_S, spin, watched

FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "spinning": spin,
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main() -> None:
    """Print the median and the worst time until all other ranks have ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help=f"of {', '.join(FAULTS)}; all without")
    parser.add_argument("--tries", type=int, default=20)
    asked = parser.parse_args()
    print(f"stall limit {FLOOR_S:.0f} s\n\n| fault | tries | median | worst |")
    print("| --- | --- | --- | --- |")
    for name in asked.faults or FAULTS:
        if name not in FAULTS:
            parser.error(f"no fault {name!r}; {', '.join(FAULTS)}")
        seconds = []
        for _ in range(asked.tries):
            with tempfile.TemporaryDirectory() as folder:
                found = watched(Path(folder), FAULTS[name], work_s=120.0)
            if "rank 1 on" not in found.said[0]:
                sys.exit(f"{name}: rank 0 named nobody: {found.said[0]!r}")
            seconds.append(found.seconds)
        median, worst = statistics.median(seconds), max(seconds)
        print(f"| {name} | {asked.tries} | {median:.1f} s | {worst:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
