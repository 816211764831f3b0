"""Train generated plans over gloo, record what every rank gives the library, and prove both.

    python tools/record_orders.py --plans 200 --seed 7 > orders.md

For each plan (`tests/runtime/plan_generator.py`; the first few dozen have every pair of features):
does the record end under NCCL's rules at their strictest, does the proof say the same, and is the
recorded order one of the proved ones?  They differ in the layers whose gradients find no room
within the passes.  Exit code 1: a record hangs, the proof says so, or the order is another.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_hetero.runtime.job.local_launch import preload
from megatron_hetero.schedule.proof.of_plan import job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from tests.runtime.plan_generator import Case, cases
from tests.runtime.recorded_operations import compared, proved_steps, proved_workload, record


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
    record_ends = not blocked_ranks(recorded.job)
    proof_ends, order = True, ""
    for is_full in (True, False):
        for how, words in proved_steps(case.plan, asked, full=is_full):
            proved = job_operations(case.plan, asked, how)
            proof_ends &= not blocked_ranks(proved)
            if is_full and not order and not compared(recorded, proved):
                order = words
    num_operations = sum(map(len, recorded.job.ranks))
    cells = [
        f"`{case.plan.layout}`".replace(" | ", " \\| "),
        case.values["schedule"],
        str(len(recorded.job.ranks)),
        f"{num_operations:,}",
        "ends" if record_ends else "hangs",
        "ends" if proof_ends else "hangs",
        order or "another",
    ]
    return cells, record_ends and proof_ends and bool(order)


if __name__ == "__main__":
    sys.exit(main())
