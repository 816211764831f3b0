"""Train random asymmetric plans beside one process of stock Megatron; print what was covered.

    python tools/prove_plans.py --plans 500 --seed 1 > proof.md

The plans contain every pair of features (`tests/runtime/plan_generator.py`).  The report is
Markdown on standard output, progress goes to standard error.  Exit code 1: a plan was not equal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_hetero.model.training import Precision
from tests.runtime.all_pairs import Space
from tests.runtime.plan_features import SPACE, TRANSFORMER_ENGINE_SPACE
from tests.runtime.plan_generator import Case, cases

if TYPE_CHECKING:
    from tests.runtime.prove import Proof


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=60, help="how many plans (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the generator (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first plan to train")
    parser.add_argument("--workers", type=int, default=2, help="plans at a time (default: 2)")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of all runs; half precision is held to what it changes of one process",
    )
    parser.add_argument(
        "--layers",
        choices=("local", "transformer_engine"),
        default="local",
        help="Megatron's local layers, or Transformer Engine's on a CPU (default: local)",
    )
    options = parser.parse_args()
    # Ranks are forked, which CUDA does not survive.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_hetero.runtime.job.local.loading import preload
    from megatron_hetero.runtime.transformer_engine import layers

    space = SPACE
    if options.layers == layers.TRANSFORMER_ENGINE:
        space = TRANSFORMER_ENGINE_SPACE
        reason = layers.provide()
        if reason is not None:
            sys.exit(f"no Transformer Engine on this CPU: {reason}")
    preload()
    import_module("tests.runtime.prove")
    chosen = list(islice(cases(options.seed, space), options.first, options.plans))
    begin = time.monotonic()
    proofs = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        for proof in pool.map(partial(_prove, precision=options.precision), chosen):
            proofs.append(proof)
            words = f"equal  {proof.case.name}" if proof.ok else f"UNLIKE {proof}"
            print(words, file=sys.stderr, flush=True)
    minutes = (time.monotonic() - begin) / 60
    if options.precision != "fp32":
        print(f"All runs in {options.precision}.\n")
    if options.layers == layers.TRANSFORMER_ENGINE:
        print("All runs with Transformer Engine's layers, its kernels in plain torch.\n")
    print("\n".join(report(proofs, options.seed, minutes, space)))
    return 0 if all(proof.ok for proof in proofs) else 1


def _prove(case: Case, precision: Precision) -> Proof:
    # It imports Megatron, which looks for Transformer Engine then.
    from tests.runtime.prove import prove

    with tempfile.TemporaryDirectory(prefix="megatron-hetero-prove-") as folder:
        return prove(case, Path(folder), precision)


def report(
    proofs: Sequence[Proof], seed: int, minutes: float, space: Space = SPACE
) -> Iterator[str]:
    """Write Markdown: the result, every plan that failed, the values, the pairs, what is
    impossible."""
    equal = [proof for proof in proofs if proof.ok]
    uneven = sum(proof.case.values["shares"] == "uneven" for proof in proofs)
    covered = {pair for proof in equal for pair in space.pairs_of(proof.case.values)}
    allowed = space.allowed_pairs()
    yield "# Random plans beside one process of stock Megatron"
    yield ""
    yield (
        f"{len(equal)} of {len(proofs)} plans of seed {seed} are equal to one process, "
        f"{uneven} of them with uneven shares ({minutes:.1f} minutes). They contain "
        f"{len(covered & allowed):,} of the {len(allowed):,} possible pairs of values of "
        f"{len(space.factors)} features."
    )
    yield from ("", "| plans | equal | with uneven shares | pairs of values |", "| --: " * 4 + "|")
    yield (
        f"| {len(proofs)} | {len(equal)} | {uneven} | {len(covered & allowed)} of {len(allowed)} |"
    )
    against_floor = sum(proof.is_against_floor for proof in equal)
    if against_floor:
        yield ""
        yield (
            f"In {against_floor} of them a gradient that is the small rest of a large sum was held "
            "to the measured floor of rounding."
        )
    for proof in proofs:
        if not proof.ok:
            yield from ("", "```", str(proof), "```")
    yield from ("", "| feature | values (plans) |", "| --- | --- |")
    for factor, values in space.factors.items():
        count = Counter(proof.case.values[factor] for proof in equal)
        yield f"| {factor} | {', '.join(f'{v} ({count[v]})' for v in values)} |"
    yield from ("", "Pairs of values that were trained, of those that are possible:", "")
    names = list(space.factors)
    yield "| | " + " | ".join(names[1:]) + " |"
    yield "| --- " * len(names) + "|"
    for i, first in enumerate(names[:-1]):
        cells = [""] * i
        for second in names[i + 1 :]:
            pairs = [pair for pair in space.pairs(first, second) if pair in allowed]
            cells.append(f"{sum(pair in covered for pair in pairs)}/{len(pairs)}")
        yield f"| {first} | {' | '.join(cells)} |"
    yield from (
        "",
        "Pairs that are not possible:",
        "",
        "| feature | feature | why |",
        "| --- " * 3 + "|",
    )
    for ((a, x), (b, y)), reason in space.excluded.items():
        yield f"| {a}: {x} | {b}: {y} | {reason} |"


if __name__ == "__main__":
    raise SystemExit(main())
