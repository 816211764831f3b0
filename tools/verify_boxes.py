"""Machines with unlike cards: every plan verified, its launch files checked, some rehearsed.

    python tools/verify_boxes.py [--only TEXT ...] [--rehearse TEXT ...] [--steps N] --keep FOLDER

For every machine and model of `tools/bench boxes` that a plan fits, `megatron-hetero verify`
trains the plan beside one process, each on a CPU with the model shrunk; `launch` writes the files
of every launcher, which `tools/check_launch_files.py` checks; and `rehearse` runs those that are
named, in the described times.  What is in the folder already is not run again.  Exit code 1: a plan
trains otherwise, a file is wrong, or a rehearsal took another time than predicted.

The columns of the optimizers are the part of its bound that the worst of losses, gradients, norm
and weights took (100 %: the bound).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.errors import InfeasiblePlanError, UnsupportedError  # noqa: E402
from megatron_hetero.flags.launchers.registry import LAUNCHERS  # noqa: E402
from megatron_hetero.plan.file import load_plan  # noqa: E402
from megatron_hetero.plan.layout import format_layout  # noqa: E402
from tools.bench.plans.boxes import jobs  # noqa: E402
from tools.check_launch_files import folder_faults  # noqa: E402
from tools.verified_runs import worst_part  # noqa: E402

COLUMNS = (
    "machine, model", "layout", "processes", "Adam", "SGD", "trains as one process",
    "launch files", "rehearsed / predicted",
)  # fmt: skip
_CANNOT_ASK = ("skypilot",)
"""Launchers whose systems cannot ask for a machine with unlike cards, which `launch` says."""


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `megatron-hetero WORDS`."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_hetero", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def planned(machine: Path, model: Path, flag: str, path: Path) -> bool:
    """Plan, unless it was done before; whether a plan fits.

    Raises:
        SystemExit: planning failed for another reason.
    """
    if not path.exists():
        done = command("plan", "--cluster", machine, "--model", model, "-o", path, "--", flag)
        if done.returncode == InfeasiblePlanError.exit_code:
            path.write_text("")
        elif done.returncode:
            raise SystemExit(f"plan {machine.stem} {model.stem}: {done.stderr}")
    return bool(path.read_text())


def verified(plan: Path, steps: int) -> dict[str, Any]:
    """Verify the plan, unless it was done before."""
    path = plan.with_suffix(".verify.json")
    if not path.exists():
        done = command("verify", plan, "--json", "--steps", str(steps))
        runs = json.loads(done.stdout)["runs"] if done.stdout else {}
        found = {"code": done.returncode, "runs": runs, "error": done.stderr[-2000:]}
        path.write_text(json.dumps(found))
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def launch_faults(plan: Path) -> Iterator[str]:
    """Write the files of every launcher and check them."""
    for launcher, found in LAUNCHERS.items():
        folder = plan.with_suffix(f".{launcher}")
        if not folder.exists():
            image = ["--image", "img"] if found.takes_image and found.brings_folder else []
            done = command("launch", plan, "--for", launcher, "-o", folder, *image)
            if launcher in _CANNOT_ASK and done.returncode == UnsupportedError.exit_code:
                continue
            if done.returncode:
                yield f"{launcher}: {done.stderr}"
                continue
        yield from folder_faults(folder)


def rehearsed(plan: Path, machine: Path) -> dict[str, Any]:
    """Rehearse the plan, unless it was done before."""
    path = plan.with_suffix(".rehearse.json")
    if not path.exists():
        done = command("rehearse", plan, "--cluster", machine, "--json")
        path.write_text(done.stdout or json.dumps({"ok": False, "stderr": done.stderr[-2000:]}))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table; exit 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=())
    parser.add_argument("--rehearse", nargs="+", metavar="TEXT", default=())
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="of each optimizer")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", required=True)
    options = parser.parse_args(arguments)
    options.keep.mkdir(parents=True, exist_ok=True)
    wrong = []
    print(f"| {' | '.join(COLUMNS)} |\n| --- | --- | --: | --: | --: | --- | --- | --: |")
    for name, machine, model, flag in jobs(options.only):
        path = options.keep.resolve() / f"{machine.stem}-{model.stem.replace('.', '_')}.json"
        if not planned(machine, model, flag, path):
            continue
        plan, found, faults = load_plan(path), verified(path, options.steps), [*launch_faults(path)]
        wrong += [f"{name}: {text}" for text in faults]
        if found["code"]:
            wrong.append(f"{name}: verify ended with {found['code']}: {found['error']}")
        ratio = ""
        if any(text in name for text in options.rehearse):
            run = rehearsed(path, machine)
            ratio = f"{1 + run['error']:.3f}" if "error" in run else "no result"
            if not run["ok"]:
                wrong.append(f"{name}: rehearsed: {ratio} {run.get('stderr', '')}")
        layout = format_layout(plan.layout).replace("|", "\\|")
        cells = (
            name, f"`{layout}`", str(plan.layout.num_devices),
            *(worst_part(found["runs"].get(optimizer)) for optimizer in ("adam", "sgd")),
            "NO" if found["code"] else "equal", "WRONG" if faults else "right", ratio,
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
    for text in wrong:
        print(text, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
