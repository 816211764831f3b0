"""The planner's promises on any number of random clusters and models.

    python tools/prove_planner.py [--cases 10000] [--seed 0] [--only WORDS]

Runs the properties of `tests/planner` with `--cases` random examples each (CI runs a share): plans
keep every invariant of `plan.checks.validate`, fit, are never worse than naive plans and never
below their bound, equal brute force and exact mode on small clusters, do not depend on the order of
the file; and more bandwidth or one more GPU never makes the best plan worse.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("test_api.py", "oracle/test_exact.py")
PROPERTIES = (
    "test_three_gpus_are_planned_as_by_brute_force",
    "test_four_gpus_are_planned_as_by_brute_force",
    "test_plans_are_valid_fit_and_beat_the_naive_ones",
    "test_the_order_of_the_file_does_not_count",
    "test_exact_is_brute_force",
    "test_the_main_search_finds_the_optimum_and_the_bound_is_below_it",
    "test_more_bandwidth_and_one_more_gpu_never_make_it_worse",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, metavar="N", help="of each property")
    parser.add_argument("--seed", type=int, default=0, help="of the random examples")
    parser.add_argument("--only", default="", metavar="WORDS", help="properties with these words")
    options = parser.parse_args(arguments)
    chosen = [name for name in PROPERTIES if options.only in name]
    if not chosen:
        parser.error(f"no property has {options.only!r} in its name: {', '.join(PROPERTIES)}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=0"]
    command += ["--hypothesis-profile=random", f"--hypothesis-seed={options.seed}"]
    command += ["--hypothesis-show-statistics"]
    command += ["-k", " or ".join(chosen)]
    command += [str(ROOT / "tests" / "planner" / name) for name in FILES]
    environment = {**os.environ, "PLANNER_CASES": str(options.cases)}
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
