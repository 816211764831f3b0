"""Train generated plans over gloo, record what every rank gives the library, and prove both.

    python tools/record_orders.py --plans 200 --seed 7 > orders.md

For each plan (`tests/runtime/plan_generator.py`; the first few dozen have every pair of features):
does the record end under NCCL's rules at their strictest, does the proof say the same, and is the
recorded order the proved one?  Exit code 1: a record hangs, or the proof says something else.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_hetero.runtime.job.local_launch import preload
from megatron_hetero.schedule.proof.of_plan import How, job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from tests.runtime.plan_generator import Case, cases
from tests.runtime.recorded_operations import compared, proved_workload, record

_FULL = How(full_buckets=True)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", type=int, default=60, help="how many plans (default: 60)")
    parser.add_argument("--seed", type=int, default=7, help="of the generator (default: 7)")
    parser.add_argument("--first", type=int, default=0, help="number of the first plan")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked, which CUDA does not survive
    preload()
    print("| plan | schedule | ranks | operations | record | proof | order |")
    print("| --- | --- | --: | --: | --- | --- | --- |")
    is_well = True
    for case in islice(cases(options.seed), options.first, options.first + options.plans):
        cells, ends = _row(case)
        is_well &= ends
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0 if is_well else 1


def _row(case: Case) -> tuple[list[str], bool]:
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-orders-") as folder:
        recorded = record(case.shrunk(case.plan), Path(folder), optimizer=case.optimizer)
    asked = proved_workload(case)
    steps = (_FULL, replace(_FULL, is_first_step=True), How())
    proved = [job_operations(case.plan, asked, how) for how in steps]
    record_ends = not blocked_ranks(recorded.job)
    proof_ends = not any(blocked_ranks(job) for job in proved)
    order = "another"
    for job, words in zip(proved[:2], ("as proved", "as proved, buckets late"), strict=True):
        if not compared(recorded, job):
            order = words
            break
    num_operations = sum(map(len, recorded.job.ranks))
    cells = [
        f"`{case.plan.layout}`".replace(" | ", " \\| "),
        case.values["schedule"],
        str(len(recorded.job.ranks)),
        f"{num_operations:,}",
        "ends" if record_ends else "hangs",
        "ends" if proof_ends else "hangs",
        order,
    ]
    return cells, record_ends and proof_ends


if __name__ == "__main__":
    sys.exit(main())
