"""Every reader of a stranger's text, with sound examples of what it reads."""

from __future__ import annotations

import json
import random
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.discovery import parse_gpus
from megatron_hetero.cluster.inventory.kubernetes import nodes_from_kubernetes
from megatron_hetero.cluster.inventory.measurements import parse_nccl_test
from megatron_hetero.cluster.inventory.remote import targets
from megatron_hetero.cluster.inventory.skypilot import nodes_from_skypilot
from megatron_hetero.cluster.inventory.slurm import nodes_from_slurm
from megatron_hetero.cluster.inventory.topology import parse_topology
from megatron_hetero.convert.flagscale import cluster_text
from megatron_hetero.convert.flagscale_job import read_flagscale_job
from megatron_hetero.convert.list_literal import parse_pipelines
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.errors import HeteroError
from megatron_hetero.files import read_json, read_text, read_yaml
from megatron_hetero.model.load import load_workload
from megatron_hetero.patching.unified_diff import hunks_of
from megatron_hetero.plan.file import load_plan, plan_to_data
from megatron_hetero.plan.layout import parse_layout
from tests.cluster.inventory import test_kubernetes, test_slurm
from tests.cluster.inventory.test_discovery import FOUR
from tests.cluster.inventory.test_measurements import log
from tests.convert.flagscale import EXPERIMENT, TRAIN
from tests.hostile.mutate import damaged
from tests.hostile.watch import watched
from tests.plan.edits import PLAN

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0
"""Processor time of one text: a reader that takes longer hangs."""

_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV4\tSYS\t0-31
GPU1\tNV4\t X \tPIX\t0-31
GPU2\tSYS\tPIX\t X \t32-63
"""
_SCRIPT = """\
#!/bin/bash
set -e
SIZE=${SIZE:-1024}
ARGS=(--num-layers 12 --hidden-size "$SIZE" --num-attention-heads 16)
if [ "$1" = big ]; then ARGS+=(--num-layers 24); fi
cat <<EOF
--seq-length 1
EOF
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}" --seq-length 1024 \\
    --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 64 2>&1 | tee log
"""
_NODES = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "List",
        "items": [test_kubernetes.node("a", "NVIDIA-A100-SXM4-80GB", memory="81920")],
    }
)
_TASK = "num_nodes: 2\nresources:\n  accelerators: {A100-80GB: 4}\nrun: echo\n"


@dataclass(frozen=True)
class Reader:
    """`read(path)` of a file called `name`, whose sound content is one of `sound`."""

    title: str
    name: str
    read: Callable[[Path], object]
    sound: Sequence[str]

    def __str__(self) -> str:
        return self.title


def _all(pattern: str) -> list[str]:
    return [path.read_text("utf-8") for path in sorted(ROOT.glob(pattern))]


def _text(read: Callable[[str], object]) -> Callable[[Path], object]:
    return lambda path: read(read_text(path))


_CLUSTERS = _all("examples/*/*.yaml")
_PLANS = [json.dumps(plan_to_data(PLAN), indent=1)]
_LAYOUTS = ["tp4:20,tp2:12 @12 | tp1:16,tp1:16 @4x2", "tp4(3:2:2:1):20 @1", "tp2cp2:8 @3"]

READERS = (
    Reader("YAML", "f.yaml", read_yaml, [*_CLUSTERS, EXPERIMENT, TRAIN]),
    Reader("JSON", "f.json", read_json, [*_PLANS, *_all("examples/*/config.json"), _NODES]),
    Reader("cluster file", "cluster.yaml", load_cluster, _CLUSTERS),
    Reader("plan file", "plan.json", load_plan, _PLANS),
    Reader("layout", "layout", _text(parse_layout), _LAYOUTS),
    Reader("Hugging Face config", "config.json", load_workload, _all("examples/*/config.json")),
    Reader("shell script", "train.sh", load_workload, [_SCRIPT, *_all("examples/*/*.sh")]),
    Reader("flag file", "job.flags", load_workload, _all("examples/*/*.flags")),
    Reader("profile", "profile.json", load_profile, _all("tests/hostile/profile.json")),
    Reader(
        "nccl-tests log",
        "nccl.log",
        _text(lambda text: parse_nccl_test(text, "a log").link()),
        [log("all_reduce", 4, 1e-5, 1e10), log("sendrecv", 2, 1e-5, 1e10)],
    ),
    Reader("topology", "topo.txt", _text(lambda text: parse_topology(text, "topo")), [_TOPOLOGY]),
    Reader("driver's list", "gpus.csv", _text(parse_gpus), [FOUR]),
    Reader("Slurm nodes", "nodes.txt", lambda p: nodes_from_slurm(p, {}), [test_slurm.NODES]),
    Reader("Kubernetes nodes", "nodes.json", lambda p: nodes_from_kubernetes(p, {}), [_NODES]),
    Reader("SkyPilot task", "task.yaml", lambda p: nodes_from_skypilot([p], {}), [_TASK]),
    Reader("host file", "hosts", lambda p: targets(None, p), ["a slots=8\nuser@b.example # x\n"]),
    Reader("FlagScale hosts", "hosts", cluster_text, ["a slots=8 type=A100\nb slots=4 type=T4\n"]),
    Reader("FlagScale experiment", "x.yaml", read_flagscale_job, [EXPERIMENT, TRAIN]),
    Reader(
        "HexiScale list",
        "list",
        _text(lambda text: parse_pipelines(text, "--it")),
        ["[[4, 2], [2]]", "[[1] * 2] * 4"],
    ),
    Reader(
        "patch", "it.patch", _text(lambda text: hunks_of(text, "it")), _all("patches/*/*.patch")
    ),
)


class _TooSlow(BaseException):
    pass


@contextmanager
def _limit() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fault(reader: Reader, path: Path) -> str | None:
    """What is wrong with how a reader takes a file: None where it reads or refuses it by name."""
    with watched(path.parent) as seen, _limit():
        try:
            reader.read(path)
        except HeteroError as error:
            if not str(error).strip():
                return "an error without a word"
        except _TooSlow:
            return f"longer than {LIMIT_S} s"
        except Exception:
            return traceback.format_exc()
    return f"it did: {seen}" if seen else None


def fuzz(reader: Reader, folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(text, fault) of those of `count` damaged texts that a reader takes badly.

    Every text is written to a file of `folder`, where FlagScale's experiment finds its job.
    """
    chance = random.Random(f"{reader.title} {seed}")
    path = folder / reader.name
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "mixed.yaml").write_text(TRAIN, "utf-8")
    for text in reader.sound:  # imports what it needs
        path.write_text(text, "utf-8")
        try:
            reader.read(path)
        except HeteroError:
            continue
    for _ in range(count):
        text = damaged(reader.sound, chance)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        wrong = fault(reader, path)
        if wrong is not None:
            yield text, wrong
