"""Slurm: a heterogeneous job with one component for each kind of node, and one step over all.

Slurm numbers the nodes in an order of its own, so each finds its rank by its name
(https://slurm.schedmd.com/heterogeneous_jobs.html).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.flags.launchers.job import Component, LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.node_script import BY_NAME, node_script

_BODY = """
# Add above what your site wants (--partition, --account, --time), to each component.
set -euo pipefail
cd -- "$SLURM_SUBMIT_DIR"
exec srun{group} --ntasks-per-node=1 --kill-on-bad-exit=1 --label bash train.sh {by_name}
"""


def slurm_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """`train.sh` and `job.sbatch`, to be submitted from their folder."""
    return (node_script(job), LaunchFile("job.sbatch", "".join(_parts(job))))


def _parts(job: LaunchJob) -> Iterator[str]:
    components = job.components
    yield "#!/usr/bin/env bash\n# sbatch job.sbatch      from this folder, on a shared disk\n"
    for component in components:
        if component.index:
            yield "#SBATCH hetjob\n"
        yield from _resources(job, component)
    group = f" --het-group=0-{len(components) - 1}" if len(components) > 1 else ""
    yield _BODY.format(group=group, by_name=BY_NAME)


def _resources(job: LaunchJob, component: Component) -> Iterator[str]:
    yield f"#SBATCH --job-name={job.name}\n"
    yield f"#SBATCH --nodes={len(component.hosts)}\n"
    yield "#SBATCH --ntasks-per-node=1\n"
    # The plan's GPU numbers are those of the whole node.
    yield "#SBATCH --exclusive\n"
    yield f"#SBATCH --gpus-per-node={component.gpus_per_node}\n"
    # The very machines, whose links the plan was made for.
    yield f"#SBATCH --nodelist={','.join(host.host for host in component.hosts)}\n"
