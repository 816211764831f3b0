"""Equal inputs give equal bytes: one plan, under many hash seeds and orders of its cluster file.

    python tools/prove_determinism.py [--seeds 20] [--cluster FILE] [--model FILE]

For each seed the lists and keys of cluster.yaml are put in another order, and a process with that
hash seed plans and writes plan.json.  All files have to be equal byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from megatron_hetero.files import canonical_json, read_yaml  # noqa: E402

PROGRAM = """
import sys
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.planner import plan_cluster
cluster, model, plan, strategy = sys.argv[1:]
save_plan(plan_cluster(load_cluster(cluster), load_workload(model), strategy=strategy), plan)
"""
EXAMPLE = ROOT / "benchmarks" / "settings" / "setting-1-7b"


def permuted(data: Any, random: Random) -> Any:
    """Return the same content with the keys of every mapping and the items of every list in another
    order: the lists of a cluster file are sets, but for the cards of a machine (`gpus`)."""
    if isinstance(data, dict):
        items = [
            (key, value if key == "gpus" else permuted(value, random))
            for key, value in data.items()
        ]
        random.shuffle(items)
        return dict(items)
    if isinstance(data, list):
        return random.sample([permuted(item, random) for item in data], len(data))
    return data


def yaml_text(data: Any) -> str:
    """Write YAML of plain data that keeps its order (JSON is YAML)."""
    if isinstance(data, dict):
        items = (f"{canonical_json(key)}: {yaml_text(value)}" for key, value in data.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(yaml_text, data)) + "]"
    return canonical_json(data)


def plan_bytes(
    cluster: Path, model: Path, seed: int, folder: Path, strategy: str = "auto"
) -> bytes:
    """Return plan.json of a permutation of the cluster, made under a hash seed."""
    file = folder / "cluster.yaml"
    file.write_text(yaml_text(permuted(read_yaml(cluster).data, Random(seed))))
    plan = folder / f"plan-{seed}.json"
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), str(model), str(plan), strategy],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        cwd=ROOT,
        check=True,
    )
    return plan.read_bytes()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20, metavar="N")
    parser.add_argument("--cluster", type=Path, default=EXAMPLE / "cluster.yaml", metavar="FILE")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model.flags", metavar="FILE")
    parser.add_argument("--strategy", default="auto", metavar="NAME")
    options = parser.parse_args(arguments)
    digests: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            content = plan_bytes(
                options.cluster, options.model, seed, Path(folder), options.strategy
            )
            digests.setdefault(hashlib.sha256(content).hexdigest(), []).append(seed)
    for digest, seeds in digests.items():
        print(f"{digest}  seeds {', '.join(map(str, seeds))}")
    print("all plans are equal" if len(digests) == 1 else f"{len(digests)} different plans")
    return 0 if len(digests) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
