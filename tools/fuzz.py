"""Give every reader hostile text, and random plans to everything that writes for a shell.

    python tools/fuzz.py                                  # 100,000 strings, 10,000 plans, new seed
    python tools/fuzz.py --strings 5000 --plans 500 --seed 7

A reader may read or refuse (`HeteroError`), in ten seconds of the processor; it may start nothing,
open no socket, and neither write nor read anywhere else.  Words become flags, names and paths to
the letter, or are refused.  Prints what was done; each fault with the seed, and exits with 1.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.hostile.mutate import word
from tests.hostile.plans import damaged_faults, layout_faults
from tests.hostile.readers import READERS, fuzz
from tests.hostile.words import word_faults

_SHOWN = 400


def main() -> int:
    """Fuzz as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strings", type=int, default=100_000, help="half texts, half words")
    parser.add_argument("--plans", type=int, default=10_000, help="half whole, half damaged")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbits(48) if options.seed is None else options.seed
    begin = time.perf_counter()
    faults = 0

    def tell(what: str, wrong: str) -> None:
        nonlocal faults
        faults += 1
        print(f"seed {seed}: {what[:_SHOWN]}\n    {wrong[-_SHOWN:]}", file=sys.stderr, flush=True)

    each = -(-options.strings // 2 // len(READERS))
    for reader in READERS:
        with tempfile.TemporaryDirectory() as folder:
            for text, wrong in fuzz(reader, Path(folder), each, seed):
                tell(f"{reader.title}: {text!r}", wrong)
    chance = random.Random(seed)
    for _ in range(options.strings - options.strings // 2):
        given = word(chance)
        for wrong in word_faults(given):
            tell(repr(given), wrong)
    for _ in range(options.plans - options.plans // 2):
        for wrong in layout_faults(chance):
            tell("a layout", wrong)
    for _ in range(options.plans // 2):
        for wrong in damaged_faults(chance):
            tell("a damaged plan", wrong)
    print(
        f"seed {seed}: {each * len(READERS)} texts for {len(READERS)} readers, "
        f"{options.strings - options.strings // 2} words, {options.plans} plans; {faults} faults "
        f"in {time.perf_counter() - begin:.0f} s"
    )
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
