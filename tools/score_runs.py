"""Score predictions against measured training runs, anybody's, by term where it was measured, and
steps by card, precision, size and cause.

    python tools/score_runs.py RUNS.yaml [--json]

The file names for each run a cluster, a plan, a profile if there is one, and what was measured;
docs/measuring.md describes it.  What the planner predicts is computed anew.  Nothing is fitted to
a run, and a rehearsal is none: it takes its times from the prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import FileFormatError, HeteroError, UsageError
from megatron_hetero.files import read_yaml, validate_document
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.file import load_plan
from megatron_hetero.schedule.estimate import estimate_plan

_Seconds = Annotated[float, Field(gt=0, le=1e5)]
_Bytes = Annotated[int, Field(gt=0)]
_Part = Literal["weights", "gradients", "optimizer", "activations", "buffers"]


_SIZES = ((1e9, "under 1B"), (4e9, "1B to 4B"), (2e10, "4B to 20B"), (1e11, "20B to 100B"))
_LARGEST = "100B and more"
_MOST_PAIRS_APART = 0.01
"""Runs whose steps are nearer to each other have no order to predict."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Measured(_Strict):
    """Measured figures, in the words of `plan.json`'s estimates; several steps give a median.

    `stage_times_s` and `boundary_times_s` are [replica][stage or boundary], null where not
    measured; `peak_bytes` is by device, and so are `live_bytes`, those of tensors by part (weights,
    gradients, optimizer, activations, buffers), as far as they were counted.
    """

    step_time_s: _Seconds | list[_Seconds]
    gradient_sync_s: _Seconds | None = None
    stage_times_s: list[list[_Seconds | None]] = []
    boundary_times_s: list[list[_Seconds | None]] = []
    peak_bytes: dict[str, _Bytes] = {}
    live_bytes: dict[str, dict[_Part, Annotated[int, Field(ge=0)]]] = {}


class Run(_Strict):
    """One training run; paths are relative to the file.  `source`: who measured, when, on what.
    `cause`: what its trainer does otherwise than Megatron, as far as the prediction cannot know.
    """

    name: str
    source: str
    cluster: str
    plan: str
    profile: str | None = None
    cause: str = ""
    measured: Measured


class Runs(_Strict):
    """Contents of the file."""

    version: Annotated[int, Field(ge=1, le=1)]
    runs: Annotated[list[Run], Field(min_length=1)]


@dataclass(frozen=True)
class Score:
    """One figure of a run, predicted and measured, in seconds or bytes."""

    run: str
    term: str
    where: str
    predicted: float
    measured: float
    groups: tuple[tuple[str, str], ...] = ()
    """(What runs are grouped by, this run's)."""

    @property
    def error(self) -> float:
        """Error of the prediction, as a part of what was measured."""
        return self.predicted / self.measured - 1


def score(path: Path) -> list[Score]:
    """Score all figures of all runs of a file.

    Raises:
        FileFormatError: the file is not as it must be, or measures what the plan has not.
        HeteroError: a cluster, plan or profile that it names is not as it must be.
    """
    runs = validate_document(read_yaml(path), Runs, FileFormatError).runs
    return [found for run in runs for found in _score_run(run, path)]


def _score_run(run: Run, path: Path) -> Iterator[Score]:
    cluster = load_cluster(path.parent / run.cluster)
    plan = load_plan(path.parent / run.plan)
    profile = load_profile(path.parent / run.profile) if run.profile else None
    workload = plan.workload
    if workload is None:
        raise UsageError(f"{path}: run {run.name!r}: {run.plan} does not say which model it is for")
    plan = replace(plan, estimates=None)
    validate_plan(plan, cluster, run.plan)
    predicted = estimate_plan(plan, cluster, profile, bounded=False)
    types = sorted({cluster.gpu_type(device).name for device in cluster.devices
                    if device.name in predicted.devices})  # fmt: skip
    training = workload.training
    groups = (
        ("card", " + ".join(types)),
        ("precision", f"fp8 beside {training.precision}" if training.fp8 else training.precision),
        ("size", _size(workload.model)),
        ("cause", run.cause or "none named"),
    )
    for term, where, a, b in _figures(run, predicted, path):
        yield Score(run.name, term, where, a, b, groups)


def _size(model: ModelSpec) -> str:
    """Name the class of a model's size."""
    layers = model.num_layers * layer_params(model, even_share(model, 1))
    num = layers + 2 * model.vocab_size * model.hidden_size
    return next((words for most, words in _SIZES if num < most), _LARGEST)


def _figures(run: Run, predicted: Estimates, path: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yield (term, where, predicted, measured)."""
    measured = run.measured
    steps = measured.step_time_s
    step_s = statistics.median(steps) if isinstance(steps, list) else steps
    yield "step", "", predicted.step_time_s, step_s
    if measured.gradient_sync_s is not None:
        yield "gradient sync", "", predicted.gradient_sync_s, measured.gradient_sync_s
    for term, of, found in (
        ("stage", predicted.stage_times_s, measured.stage_times_s),
        ("boundary", predicted.boundary_times_s, measured.boundary_times_s),
    ):
        if found and [len(row) for row in found] != [len(row) for row in of]:
            raise FileFormatError(
                f"{path}: run {run.name!r}: {term}_times_s has {[len(row) for row in found]} "
                f"figures by replica, the plan {[len(row) for row in of]}; put null where "
                "nothing was measured"
            )
        for r, row in enumerate(found):
            for i, seconds in enumerate(row):
                if seconds is not None:
                    yield term, f"replica {r}, {term} {i}", of[r][i], seconds
    for device, num_bytes in measured.peak_bytes.items():
        _check_device(run, device, predicted, "peak_bytes", path)
        yield "bytes", device, predicted.devices[device].tensor_bytes, num_bytes
    for device, parts in measured.live_bytes.items():
        _check_device(run, device, predicted, "live_bytes", path)
        own = predicted.devices[device].parts_bytes
        yield "live bytes", device, sum(own.get(part, 0) for part in parts), sum(parts.values())


def _check_device(run: Run, device: str, predicted: Estimates, key: str, path: Path) -> None:
    if device not in predicted.devices:
        raise FileFormatError(
            f"{path}: run {run.name!r}: {key} of {device}, which the plan does not use; "
            f"it has {', '.join(predicted.devices)}"
        )


def tables(scores: Sequence[Score]) -> Iterator[str]:
    """Yield the steps of all runs and the errors of each term, as Markdown."""
    yield "| run | predicted | measured | error |"
    yield "| --- | --: | --: | --: |"
    for one in scores:
        if one.term == "step":
            yield f"| {one.run} | {one.predicted:.4g} s | {one.measured:.4g} s | {one.error:+.1%} |"
    yield ""
    yield "| term | figures | mean | worst | too low by at most |"
    yield "| --- | --: | --: | --: | --: |"
    for term, errors in errors_by_term(scores).items():
        mean = statistics.mean(map(abs, errors))
        cells = (f"{mean:.1%}", f"{max(map(abs, errors)):.1%}", f"{max(0.0, -min(errors)):.1%}")
        yield f"| {term} | {len(errors)} | {' | '.join(cells)} |"
    steps = [one for one in scores if one.term == "step"]
    yield ""
    yield "| steps by | | runs | mean | bias | worst | pairs in the right order |"
    yield "| --- | --- | --: | --: | --: | --: | --: |"
    for (kind, value), own in by_group(steps).items():
        errors = [one.error for one in own]
        worst = max(errors, key=abs)
        mean = statistics.mean(map(abs, errors))
        cells = (f"{mean:.1%}", f"{statistics.mean(errors):+.1%}", f"{worst:+.1%}")
        yield f"| {kind} | {value} | {len(own)} | {' | '.join(cells)} | {ordered(own)} |"


def by_group(scores: Sequence[Score]) -> Mapping[tuple[str, str], list[Score]]:
    """Group scores by card, precision, size and cause, and all of them."""
    found: dict[tuple[str, str], list[Score]] = {("all", ""): list(scores)}
    for kind in dict.fromkeys(kind for one in scores for kind, _ in one.groups):
        for one in scores:
            found.setdefault((kind, dict(one.groups)[kind]), []).append(one)
    return found


def ordered(scores: Sequence[Score]) -> str:
    """Write the part of the pairs of runs whose quicker one was predicted to be; empty without a
    pair."""
    right = [
        (one.predicted < other.predicted) == (one.measured < other.measured)
        for one, other in combinations(scores, 2)
        if abs(math.log(one.measured / other.measured)) > _MOST_PAIRS_APART
    ]
    return f"{statistics.mean(right):.0%} of {len(right)}" if right else ""


def errors_by_term(scores: Sequence[Score]) -> Mapping[str, list[float]]:
    """Group the errors of all figures by term."""
    found: dict[str, list[float]] = {}
    for one in scores:
        found.setdefault(one.term, []).append(one.error)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUNS.yaml")
    parser.add_argument("--json", action="store_true", help="every figure")
    options = parser.parse_args(arguments)
    try:
        scores = score(options.runs)
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps([{**asdict(one), "error": one.error} for one in scores], indent=1))
        return 0
    print("\n".join(tables(scores)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
