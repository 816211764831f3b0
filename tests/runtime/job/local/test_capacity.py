"""Memory that processes may take: of the machine, and of the groups that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.runtime.job.local.capacity import available_bytes

MEMORY = "MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable: 8000 kB\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMORY, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 8000 << 10),  # caches count as free
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 8000 << 10),
        # A container, whose own group is the mount; caches of files are given back.
        ("0::/\n", {"memory.max": "3000\n", "memory.current": "1000\n",
                    "memory.stat": "anon 700\ninactive_file 200\n"}, 2200),
        # A batch job: the limit is that of a group above.
        ("0::/slurm/job_1/step\n", {"slurm/job_1/memory.max": "3000\n",
                                    "slurm/job_1/memory.current": "4000\n"}, 0),
        # Version 1; in a container the path is one of the host.
        ("5:cpu:/x\n4:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": "500\n",
                                              "memory/memory.usage_in_bytes": "100\n",
                                              "memory/memory.stat": "total_inactive_file 7\n"},
         407),
    ],
)  # fmt: skip
def test_the_tightest_limit_counts(
    cgroup: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert available_bytes(machine(tmp_path, cgroup, groups)) == expected
