"""The operations of a real job over gloo, recorded on every rank as the proof has them.

`install` notes what a process gives `torch.distributed`, and where its host waits for results;
`read` makes the operations of the job out of the files of all ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.lab.verify.small.text import VOCAB_SIZE
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.communication.communicators import Communicator
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.faults.progress import PROGRESS
from megatron_hetero.runtime.gradients.groups import rounds
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.parallel.pipeline import always_send_parts
from megatron_hetero.schedule.proof.of_plan import How
from megatron_hetero.schedule.proof.operations import Item, JobOperations
from tests.runtime.layout_generator import GLOBAL_BATCH_SIZE
from tests.runtime.plan_generator import PADDED_VOCABULARY, Case

_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_to_all_single", "barrier", "reduce", "gather", "scatter", "_all_gather_base",
    "_reduce_scatter_base",
)  # fmt: skip
_READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__")
"""Methods by which a host waits for what a GPU computes."""


@dataclass(frozen=True)
class Recorded:
    """A recorded job: its operations, of every rank the step in which each was given, and the
    number of steps."""

    job: JobOperations
    steps: Sequence[Sequence[int]]
    num_steps: int


class Recorder:
    """What one process does, in order."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.items: list[tuple[Item, int]] = []
        self._number_of: dict[str, int] = {}
        self._num_operations = 0

    def install(self) -> None:
        """Note everything from here on."""
        made, batch = dist.new_group, dist.batch_isend_irecv

        def new_group(ranks: Sequence[int], *given: Any, **named: Any) -> Any:
            group = made(ranks, *given, **named)
            self._add_group(list(ranks), group)
            return group

        def batched(operations: list[Any]) -> list[Any]:
            messages = tuple((o.peer, o.op.__name__ == "isend") for o in operations)
            number = self._add("messages", operations[0].group, messages, "messages")
            return [_Work(work, number, self) for work in batch(operations)]

        _replace(made, new_group)
        _replace(batch, batched)
        # As on a GPU, where the thread that starts an exchange gives all of its rounds.
        rounds.RoundsEngine.start = _start_at_once
        for name in _COLLECTIVES:
            function = getattr(dist, name)
            _replace(function, self._collective(name, function))
        for name in _READS:
            setattr(torch.Tensor, name, self._read(getattr(torch.Tensor, name)))

    def wait(self, number: int) -> None:
        """Note that computations wait for an operation."""
        self.items.append((Item("wait", operation=number), PROGRESS.current.step))

    def save(self, file: Path) -> None:
        file.write_text(json.dumps({"groups": self.groups, "items": self.items}))

    def _add_group(self, ranks: list[int], group: Any) -> None:
        if not self.groups and group is not dist.group.WORLD:
            self._add_group(list(range(dist.get_world_size())), dist.group.WORLD)
        if len(ranks) > 1:
            if isinstance(group, dist.ProcessGroup):
                self._number_of[group.group_name] = len(self.groups)
            self.groups.append(ranks)

    def _add(self, kind: Any, group: Any, messages: Any, what: str) -> int:
        group = group or dist.group.WORLD
        if not self.groups:
            self._add_group(list(range(dist.get_world_size())), dist.group.WORLD)
        number = self._num_operations
        if group.size() > 1:
            item = Item(kind, self._number_of[group.group_name], number, messages, what)
            self.items.append((item, PROGRESS.current.step))
            self._num_operations += 1
            return number
        return -1

    def _collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            groups = [g for g in (*given, *named.values()) if isinstance(g, dist.ProcessGroup)]
            number = self._add("collective", groups[0] if groups else None, (), name)
            result = function(*given, **named)
            if named.get("async_op") and result is not None:
                return _Work(result, number, self)
            if number >= 0:
                self.wait(number)
            return result

        return call

    def _read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *given: Any, **named: Any) -> Any:
            if self.items and self.items[-1][0].kind != "sync":
                self.items.append((Item("sync"), PROGRESS.current.step))
            return function(tensor, *given, **named)

        return call


class _Work:
    """A work whose waits are noted."""

    def __init__(self, work: Any, number: int, recorder: Recorder) -> None:
        self._work, self._number, self._recorder = work, number, recorder

    def wait(self, *given: Any, **named: Any) -> Any:
        if self._number >= 0:
            self._recorder.wait(self._number)
        return self._work.wait(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _replace(function: Any, by: Any) -> None:
    """Replace a function of torch's wherever it is called by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("megatron", "megatron_hetero") or module is dist:
            for attribute, value in list(vars(module).items()):
                if value is function:
                    setattr(module, attribute, by)


def _start_at_once(engine: Any, of: Any, flat: Any, group: Any) -> Any:
    turn = None if of.pair is None else of.pair.next_turn()
    work = rounds.RoundsWork(lambda: of.run(flat, group, 0, turn))
    work.run()
    return work


def read(folder: Path, num_ranks: int, num_steps: int) -> Recorded:
    """Read the operations of all ranks."""
    files = [json.loads((folder / f"operations-{r}.json").read_text()) for r in range(num_ranks)]
    (groups,) = {tuple(map(tuple, of["groups"])) for of in files}
    items = [[_item(*item) for item, _ in of["items"]] for of in files]
    carries = {i.group for of in items for i in of if i.kind == "messages"}
    collects = {i.group for of in items for i in of if i.kind == "collective"}
    communicators = [
        Communicator("forward" if n in carries - collects else "gradients", ranks)
        for n, ranks in enumerate(groups)
    ]
    steps = [[step for _, step in of["items"]] for of in files]
    return Recorded(JobOperations(communicators, items), steps, num_steps)


def _item(kind: Any, group: int, operation: int, messages: Any, what: str) -> Item:
    return Item(kind, group, operation, tuple((peer, sent) for peer, sent in messages), what)


def record(shrunk: Shrunk, folder: Path, steps: int = 2, optimizer: Any = "adam") -> Recorded:
    """Train a small job over gloo and record it."""
    jobs = VerifyJobs(shrunk, Options(steps=steps), folder)
    run_jobs([jobs.seed_job()], 120)
    save_plan(shrunk.plan, folder / "plan.json")
    argv = [
        *jobs.training_arguments(optimizer),
        *shrunk.plan_args,
        f"--hetero-plan={folder / 'plan.json'}",
        f"--data-cache-path={folder / 'cache'}",
    ]

    def train(rank: int) -> None:
        recorder = Recorder()
        always_send_parts()
        recorder.install()
        entry.main(argv)
        recorder.save(folder / f"operations-{rank}.json")

    num_ranks = shrunk.plan.layout.num_devices
    run_jobs([LocalJob("recorded", num_ranks, train, folder)], 240)
    return read(folder, num_ranks, steps)


def compared(recorded: Recorded, proved: JobOperations) -> list[str]:
    """Compare a recorded job with its proved operations; return the differences in words.

    Every recorded step must begin with the whole proved step of training; at the end of a step a
    real job may write checkpoints and validate.  The first step, in which no bucket starts early,
    is left out.
    """
    job, found = recorded.job, []
    number_of = _same_groups(job, proved)
    if number_of is None:
        return [f"groups {[g.ranks for g in job.groups]}, not {[g.ranks for g in proved.groups]}"]
    for rank, items in enumerate(proved.ranks):
        wanted = list(order_of_step(proved, items[proved.training[rank]]))
        for step in range(2, recorded.num_steps + 1):
            given = [
                item._replace(group=number_of.get(item.group, -1))
                for item, of in zip(job.ranks[rank], recorded.steps[rank], strict=True)
                if of == step
            ]
            made = list(order_of_step(proved, given))[: len(wanted)]
            if made != wanted:
                at = next(
                    (n for n, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b),
                    len(made),
                )
                found.append(
                    f"rank {rank}, step {step}, place {at}: recorded {made[at : at + 6]}, "
                    f"proved {wanted[at : at + 6]}"
                )
    return found


def proved_steps(plan: Plan, workload: Workload, *, full: bool) -> Iterator[tuple[How, str]]:
    """Yield every order that a step may have: how far gradients find room within the passes.

    Args:
        plan: the plan.
        workload: its model and training.
        full: one bucket for each set of ranks, as of a small model; else one for each layer.
    """
    yield How(full_buckets=full), "as proved"
    if workload.training.overlap_grad_reduce:
        for layer in range(EMBEDDING, workload.model.num_layers + 1):
            words = "embeddings" if layer == EMBEDDING else f"gradients up to layer {layer}"
            yield How(full_buckets=full, deepest_late=layer), f"as proved, {words} after the passes"


def _same_groups(job: JobOperations, proved: JobOperations) -> dict[int, int] | None:
    """Return place of a recorded group -> its place in the proof; None where they differ.

    Groups of gradients are made in the order of buckets, which within a layer is the model's.
    """
    uses = [group.use for group in proved.groups]
    # One pipeline with untied embeddings exchanges no gradients.
    model = uses.index("gradients") if "gradients" in uses else len(uses)
    ranks = [[group.ranks for group in of.groups] for of in (job, proved)]
    if ranks[0][:model] != ranks[1][:model] or sorted(ranks[0]) != sorted(ranks[1]):
        return None
    left = list(range(model, len(ranks[1])))
    found = {number: number for number in range(model)}
    for number in range(model, len(ranks[0])):
        found[number] = next(n for n in left if ranks[1][n] == ranks[0][number])
        left.remove(found[number])
    return found


def order_of_step(job: JobOperations, items: Sequence[Item]) -> Iterator[tuple[Any, ...]]:
    """Yield what a rank gives in a step: messages one by one; what is inside of a stage once; and
    gradients that follow each other as a set, because within a layer their order is the model's."""
    last: tuple[Any, ...] = ()
    gradients: set[int] = set()
    for item in items:
        if item.kind not in ("messages", "collective"):
            continue
        group = job.groups[item.group]
        if group.use == "world" or len(group.ranks) == len(job.ranks):
            continue
        if item.kind == "messages" and group.use in ("forward", "backward", "shapes"):
            now: tuple[Any, ...] = (item.group, tuple(sorted(set(item.messages))))
        elif group.use in ("tensor", "context", "stage"):
            now = ("inside of the stage",)
            if now == last:
                continue
        else:
            gradients.add(item.group)
            last = ()
            continue
        if gradients:
            yield "gradients", tuple(sorted(gradients))
            gradients = set()
        yield now
        last = now
    if gradients:
        yield "gradients", tuple(sorted(gradients))


def proved_workload(case: Case) -> Workload:
    """Return the workload of a generated case, as the proof asks for it."""
    values, divided = case.values, case.values["optimizer state"]
    training = TrainingSpec(
        GLOBAL_BATCH_SIZE,
        int(values["micro-batch size"]) if values["micro-batch size"].isdigit() else 1,
        sequence_parallel=values["sequence parallel"] == "on",
        use_distributed_optimizer=divided != "whole",
        overlap_grad_reduce=values["gradient sync"] == "overlapped",
        overlap_param_gather=divided == "divided, gathers overlapped",
        per_token_loss=values["loss"] == "per token",
    )
    divisor = case.shrunk(case.plan).plan.layout.tensor_parallel_widths
    model = replace(
        case.model,
        vocab_size=VOCAB_SIZE,
        make_vocab_size_divisible_by=PADDED_VOCABULARY // lcm(*divisor),
    )
    return Workload(model, training, (), case.name)
