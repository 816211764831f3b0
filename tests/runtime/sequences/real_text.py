"""A training on real text: flexible sequences beside one process of stock Megatron.

    python -m tests.runtime.sequences.real_text --steps 200

The documents are the files of 16 to 4,096 bytes of this Python's standard library, a byte a token.
Three processes stand for two cards of one type and one of half its speed; the search deals each
step.  It prints the loss curves, how far they are apart, and the balance of the ranks.
"""

from __future__ import annotations

import argparse
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch

from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.sequences.flexible_runs import flexible_job, records, stock_job, write_cluster

SHORTEST, LONGEST = 16, 4096
FLAGS = (
    "--swiglu", "--group-query-attention", "--num-query-groups=2", "--normalization=RMSNorm",
    "--disable-bias-linear", "--position-embedding-type=rope", "--vocab-size=257",
    "--optimizer=adam", "--lr=2e-3", "--init-method-std=0.05", "--clip-grad=1.0",
    "--max-position-embeddings=4096",
)  # fmt: skip
_NUM_RANKS = 3


def write_files(prefix: Path) -> list[int]:
    """Write each fitting file of the standard library as a document; return their lengths."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    root = Path(sysconfig.get_paths()["stdlib"])
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(257))
    lengths = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or not SHORTEST < path.stat().st_size + 1 <= LONGEST:
            continue
        tokens = numpy.array([*path.read_bytes(), 256])
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
        lengths.append(len(tokens))
    builder.finalize(f"{prefix}.idx")
    return lengths


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=6, help="documents of a step")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        lengths = write_files(folder / "text")
        cluster = write_cluster(folder / "cluster.yaml", "30 ms", a=("BRISK", 2), b=("TIRED", 1))
        flags = [
            *FLAGS, f"--data-path={folder / 'text'}", f"--train-iters={given.steps}",
            f"--global-batch-size={given.batch}", "--hetero-stall-limit=0",
        ]  # fmt: skip
        ours = flexible_job(folder / "ours", cluster, _NUM_RANKS, flags)
        one = stock_job(folder / "one", [f for f in flags if "hetero" not in f])
        before = time.monotonic()
        run_jobs([ours, one], 3600)
        print(f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens; "
              f"both runs together took {time.monotonic() - before:.0f} s\n")  # fmt: skip
        _report(ours, one)
    return 0


def _report(ours: LocalJob, one: LocalJob) -> None:
    mine, theirs = records(ours)[-1].losses, records(one)[0].losses
    log = (ours.directory / f"rank-{_NUM_RANKS - 1}.log").read_text()
    lines = re.findall(r"\[sequences\] .*? groups of the last step: (.*?) \| .*mean: "
                       r"([0-9.]+), predicted ([0-9.]+)", log)  # fmt: skip
    far = {step: abs(mine[step] / theirs[step] - 1) for step in theirs}
    sizes = {int(s) for shape, *_ in lines for s in re.findall(r"x(\d+)", shape)}
    print("| step | loss, flexible | loss, one process | relative distance |")
    print("| --: | --: | --: | --: |")
    for step in sorted({1, len(theirs), *range(25, len(theirs), 25)}):
        print(f"| {step} | {mine[step]:.6f} | {theirs[step]:.6f} | {far[step]:.1e} |")
    real, predicted = (numpy.array([float(line[i]) for line in lines]) for i in (1, 2))
    print(f"\nlargest relative distance of a step's loss: {max(far.values()):.1e}")
    print(f"groups of {', '.join(map(str, sorted(sizes)))} ranks, "
          f"{len({line[0] for line in lines})} different shapes of a step")  # fmt: skip
    print(f"busiest over mean: {numpy.median(real):.2f}, predicted {numpy.median(predicted):.2f} "
          f"(medians of {len(lines)} steps)")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
