"""Job files of NVIDIA's own tree on an asymmetric plan: which start, and what stops the others.

    git clone https://github.com/NVIDIA/Megatron-LM && python tools/nvidia_jobs.py Megatron-LM

Reads the arguments of every `tests/functional_tests/test_cases/*/*/model_config.yaml` of a GPT-like
model, and judges them by the table of flags (`flags.support`), by which the runtime refuses too.
Flags of parallelism are the plan's, and flags that Megatron does not know are a script's own.
`tools/start_nvidia_jobs.py` starts those that nothing stops.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.support.lookup import refused_among
from megatron_hetero.model.flag_table import flag_table

KINDS = ("common", "gpt", "gpt-nemo", "mixtral", "moe", "nemotron")
"""Folders of GPT-like models."""
REASONS = {
    "another kind of job or model": (
        "--perform-rl-step", "--experimental-attention-variant", "--hybrid-layer-pattern",
        "--hybrid-context-parallel", "--inprocess-restart", "--moe-latent-size", "MODE",
    ),
    "another way to divide the model or its state": (
        "--use-megatron-fsdp", "--use-torch-fsdp2", "--optimizer", "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer", "--fine-grained-activation-offloading",
        "--cpu-offloading-num-layers", "--overlap-param-gather-with-optimizer-step",
        "--replication",
    ),
    "another form of checkpoints": (
        "--ckpt-format", "--dist-ckpt-strictness", "--use-mp-args-from-checkpoint-args",
        "--ckpt-convert-format", "--non-persistent-ckpt-type",
    ),
    "a schedule or graph of its own": (
        "--cuda-graph-impl", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
        "--defer-embedding-wgrad-compute", "--optimizer-cuda-graph",
    ),
    "a form of fp8 that no stage has alone": (
        "--fp8-param-gather", "--fp8-recipe", "--first-last-layers-bf16", "--fp4-format",
    ),
}  # fmt: skip
"""Reason -> the flags that are refused for it; MODE is the file's own word for what it starts."""
TRAINING = "pretraining"
"""The mode of a file that names none."""
OPTIMIZERS = ("adam", "sgd")
"""Optimizers whose update of a number does not depend on the matrix around it."""


@dataclass(frozen=True)
class Judged:
    """One job file: the options that stop it, or why it could not be read."""

    path: Path
    refused: tuple[str, ...] = ()
    unreadable: str = ""

    @property
    def reasons(self) -> set[str]:
        """Return the reasons of its refusals; a flag without one is its own reason."""
        names = [option.split()[0] for option in self.refused]
        return {next((r for r, fs in REASONS.items() if n in fs), n) for n in names}


def job_files(tree: Path) -> Iterator[Path]:
    """Yield the job files of GPT-like models."""
    cases = tree / "tests" / "functional_tests" / "test_cases"
    for kind in KINDS:
        yield from sorted((cases / kind).glob("*/model_config.yaml"))


def arguments_of(text: str) -> list[str]:
    """Return the arguments in a job file, as its launcher passes them to the script."""
    given: Any = (yaml.safe_load(text) or {}).get("MODEL_ARGS") or {}
    argv = []
    for name, value in given.items() if isinstance(given, dict) else ():
        if value is None or value is False:
            continue
        argv.append(str(name))
        if isinstance(value, list):
            argv += map(str, value)
        elif value is not True:
            flag = flag_table().by_name.get(name)
            takes_one = flag is not None and flag.bounds[1] == 1
            text = str(value)
            argv += [text] if takes_one else _words(text)
    return argv


def _words(text: str) -> list[str]:
    """Split a value as NVIDIA's launcher does, which takes the brackets off a list."""
    is_list = text.startswith("[") and text.endswith("]")
    return text[1:-1].split() if is_list else text.split()


def mode_of(text: str) -> str:
    """Return what a job file starts: `pretraining`, `inference` or `rl`."""
    return str((yaml.safe_load(text) or {}).get("MODE") or TRAINING)


def judge(path: Path) -> Judged:
    """Judge one job file under an asymmetric plan."""
    table, text = flag_table(), path.read_text(encoding="utf-8")
    # A variable of the launcher stands for a number.
    argv = table.known_part([word.replace("${REPEAT}", "1") for word in arguments_of(text)])
    try:
        options, refused = table.split(argv), [str(option) for option in refused_among(argv)]
    except UsageError as error:
        return Judged(path, unreadable=str(error))
    # What the table of flags does not say: another script, another optimizer.
    if (mode := mode_of(text)) != TRAINING:
        refused.insert(0, f"MODE {mode}")
    chosen = (option for option in options if option.name == "--optimizer")
    refused += [str(option) for option in chosen if option.values[0] not in OPTIMIZERS]
    return Judged(path, tuple(refused))


def table_of(found: Sequence[Judged]) -> str:
    """Return the counts as a table in Markdown."""
    stopped = [judged for judged in found if judged.refused]
    unread = [judged for judged in found if judged.unreadable]
    reasons = Counter(reason for judged in stopped for reason in judged.reasons)
    free = len(found) - len(stopped) - len(unread)
    lines = ["| job files | |", "| --- | --: |", f"| all | {len(found)} |"]
    lines.append(f"| no flag stops them | {free} |")
    lines += [f"| stopped by {reason} | {count} |" for reason, count in reasons.most_common()]
    lines.append(f"| not arguments of Megatron's parser | {len(unread)} |")
    return "\n".join([*lines, f"| share that nothing stops | {100 * free / len(found):.0f} % |"])


def main() -> None:
    """Print the table, and what stops each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="a clone of Megatron-LM")
    parser.add_argument("--each", action="store_true", help="name each file that is stopped")
    asked = parser.parse_args()
    found = [judge(path) for path in job_files(asked.tree)]
    if not found:
        sys.exit(f"{asked.tree}: no tests/functional_tests/test_cases of Megatron-LM there")
    print(table_of(found))
    for judged in found if asked.each else ():
        if judged.refused or judged.unreadable:
            name = judged.path.parent.relative_to(asked.tree)
            print(f"{name}: {judged.unreadable or ', '.join(judged.refused)}")


if __name__ == "__main__":
    main()
