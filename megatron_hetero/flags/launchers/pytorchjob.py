"""Kubeflow: a PyTorchJob (kubeflow.org/v1) of one master and its workers.

A PyTorchJob has two pod templates, `Master` for one pod and `Worker` for all others. The first node
of the plan is the master, with as many GPUs as it has; the workers share a template, so that they
have equally many GPUs of one maker, of unlike types if need be. A plan whose other nodes differ in
that number is refused: a JobSet (`--for kubernetes`) holds it.

The operator gives pods ranks in the order in which it makes them. The plan's ranks belong to
machines instead, so that each pod finds its rank by the name of its node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.launchers.job import Component, LaunchFile, LaunchJob, indented
from megatron_hetero.flags.launchers.launcher import (
    Action,
    Launcher,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.pod import (
    component_resource,
    kubectl_commands,
    pod_files,
    pod_image,
    pod_spec,
)
from megatron_hetero.plan.plan import Host

_FILE = "pytorchjob.yaml"
_JOB = """\
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {name}
spec:
  runPolicy:
    # A plan has no spare place: with one pod lost the others are ended too.
    cleanPodPolicy: Running
  pytorchReplicaSpecs:
"""
_REPLICAS = """\
    {role}:
      replicas: {count}
      restartPolicy: Never
      template:
        spec:
"""


def pytorchjob_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return one manifest that holds the plan, `train.sh` and the PyTorchJob.

    Raises:
        UsageError: there is no image, a wheel is given, or the plan is too large for a ConfigMap.
        UnsupportedError: nodes after the first have unlike numbers or makers of GPUs, or a node has
            GPUs of several makers.
    """
    objects = _parts(job, pod_image(job))
    return (pod_files(job, _FILE, "Kubeflow's training operator", objects),)


def _parts(job: LaunchJob, image: str) -> Iterator[str]:
    # (host, its component) by rank; the first node is the master.
    nodes = [(host, part) for part in job.components for host in part.hosts]
    workers = nodes[1:]
    _check_alike(workers)
    yield _JOB.format(name=job.name)
    yield _replicas(job, image, "Master", nodes[:1])
    if workers:
        yield _replicas(job, image, "Worker", workers)


def _check_alike(workers: Sequence[tuple[Host, Component]]) -> None:
    """Refuse workers that no one pod template describes."""
    limits = {(component_resource(part), part.gpus_per_node) for _, part in workers}
    if len(limits) > 1:
        found = "; ".join(
            f"{host.host}: {part.gpus_per_node} x {part.kind}" for host, part in workers
        )
        raise UnsupportedError(
            "--for pytorchjob: all workers of a PyTorchJob ask for one number of GPUs of one "
            f"maker, and the nodes after the first are unlike ({found}). Launch by --for "
            "kubernetes (a JobSet), Slurm or ssh."
        )


def _replicas(
    job: LaunchJob, image: str, role: str, nodes: Sequence[tuple[Host, Component]]
) -> str:
    # All nodes of a role have one template, by the check above.
    part = nodes[0][1]
    pod = pod_spec(
        job,
        [host for host, _ in nodes],
        part,
        image=image,
        master=f"{job.name}-master-0",
        container="pytorch",
        port_name="pytorchjob-port",
        note="The operator wants this name, and the port's, whose number it gives to all pods.",
    )
    return _REPLICAS.format(role=role, count=len(nodes)) + indented(pod, 10)


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    label = f"training.kubeflow.org/job-name={record.name}"
    return kubectl_commands("pytorchjob", label, _FILE, record, action)


PYTORCHJOB = Launcher(
    "pytorchjob",
    pytorchjob_files,
    f"kubectl apply -f {{folder}}/{_FILE}",
    _commands,
    brings_folder=True,
    takes_image=True,
)
