"""Train plans over gloo, record what every rank gives the library, and prove both.

    python tools/record_orders.py --plans 200 --seed 7 > orders.md
    python tools/record_orders.py --pages > orders-of-pages.md

For each generated plan (`tests/runtime/plan_generator.py`; the first few dozen have every pair of
features), or each plan and layout that README, docs, examples and stories print: does the record
end under NCCL's rules at their strictest, does the proof say the same, and is the recorded order
one of the proved ones?  They differ in the layers whose gradients find no room within the passes.
Printed plans are trained with the distributed optimizer and both overlaps, in 8 micro-batches at
most where an equal part of each replica's can be taken; those of more than 8 GPUs are not recorded:
the rules are applied to their operations as the proof writes them.  Plans of stock Megatron are
stock's to order: they are recorded, with nothing to compare.

Exit code 1: a record hangs, the proof says so, or the order is another.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from printed_plans import make_plan, printed_commands, printed_layouts

from megatron_hetero.lab.verify.small.shrink import Shrunk, shrink
from megatron_hetero.lab.verify.small.text import VOCAB_SIZE
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.loading import preload
from megatron_hetero.schedule.proof.of_plan import job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from megatron_hetero.schedule.stock import is_stock
from tests.runtime.plan_generator import Case, cases
from tests.runtime.recorded_operations import compared, proved_steps, proved_workload, record
from tests.runtime.workloads import workload

_MOST_RANKS = 8
_MOST_MICRO_BATCHES = 8
_OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@dataclass(frozen=True)
class Job:
    """A plan to record.

    Attributes:
        shrunk: what is trained.
        asked: the same model and training, as the proof asks for them.
        schedule: in words.
        optimizer: of the training.
    """

    shrunk: Shrunk
    asked: Workload
    schedule: str
    optimizer: str = "adam"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", type=int, default=60, help="how many plans (default: 60)")
    parser.add_argument("--seed", type=int, default=7, help="of the generator (default: 7)")
    parser.add_argument("--first", type=int, default=0, help="number of the first plan")
    parser.add_argument("--pages", action="store_true", help="the plans that the pages print")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked, which CUDA does not survive
    preload()
    print("| plan | schedule | ranks | operations | record | proof | order |")
    print("| --- | --- | --: | --: | --- | --- | --- |")
    is_well = True
    generated = map(_generated, cases(options.seed))
    of_pages = _printed() if options.pages else generated
    for job in islice(of_pages, options.first, options.first + options.plans):
        cells, ends = _row(job)
        is_well &= ends
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0 if is_well else 1


def _generated(case: Case) -> Job:
    asked = proved_workload(case)
    return Job(case.shrunk(case.plan), asked, case.values["schedule"], case.optimizer)


def _printed() -> Iterator[Job]:
    """Yield the plans that the pages print, smallest first, then those that their commands make."""
    for printed in printed_layouts(_MOST_MICRO_BATCHES):
        plan = plan_from_layout(parse_layout(str(printed.layout)))
        yield _overlapping(plan, workload(num_layers=plan.layout.replicas[0].num_layers))
    with tempfile.TemporaryDirectory() as folder:
        for printed in printed_commands():
            path, _ = make_plan(printed, Path(folder))
            plan = load_plan(path)
            if plan.workload is not None:
                yield _overlapping(plan, plan.workload)


def _overlapping(plan: Plan, asked: Workload) -> Job:
    """Return a small job of a plan that divides the optimizer's state, with both overlaps."""
    shrunk = shrink(replace(plan, estimates=None), asked)
    flags = _OVERLAPS[1:2] if is_stock(plan) else _OVERLAPS
    shrunk = replace(shrunk, plan_args=(*shrunk.plan_args, *flags))
    training = replace(
        asked.training,
        global_batch_size=shrunk.global_batch_size,
        micro_batch_size=shrunk.micro_batch_size,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    model = replace(shrunk.model, vocab_size=VOCAB_SIZE, make_vocab_size_divisible_by=4)
    return Job(shrunk, replace(asked, model=model, training=training), plan.schedule)


def _row(job: Job) -> tuple[list[str], bool]:
    plan = job.shrunk.plan
    recorded = None
    if plan.layout.num_devices <= _MOST_RANKS:
        with tempfile.TemporaryDirectory(prefix="megatron-hetero-orders-") as folder:
            recorded = record(job.shrunk, Path(folder), optimizer=job.optimizer)
    record_ends = recorded is None or not blocked_ranks(recorded.job)
    proof_ends, order, num_operations = True, "", 0
    orders = [] if is_stock(plan) else [True, False]
    for is_full in orders:
        for how, words in proved_steps(plan, job.asked, full=is_full):
            proved = job_operations(plan, job.asked, how)
            proof_ends &= not blocked_ranks(proved)
            num_operations = num_operations or sum(map(len, proved.ranks))
            if recorded and is_full and not order and not compared(recorded, proved):
                order = words
    if recorded is not None:
        num_operations = sum(map(len, recorded.job.ranks))
    if not orders:
        order = "stock Megatron's"
    elif recorded is None:
        order = "from the proof"
    cells = [
        f"`{plan.layout}`".replace(" | ", " \\| "),
        job.schedule,
        str(plan.layout.num_devices),
        f"{num_operations:,}",
        "-" if recorded is None else "ends" if record_ends else "hangs",
        "-" if not orders else "ends" if proof_ends else "hangs",
        order or "another",
    ]
    return cells, record_ends and proof_ends and bool(order)


if __name__ == "__main__":
    sys.exit(main())
