"""Kubeflow: a PyTorchJob (kubeflow.org/v1) of one master and its workers.

A PyTorchJob has two pod templates, `Master` for one pod and `Worker` for all others. The first node
of the plan is the master, with as many GPUs as it has; the workers share a template, so that they
have equally many GPUs of one maker, of unlike types if need be. A plan whose other nodes differ in
that number is refused: a JobSet (`--for kubernetes`) holds it.

The operator gives pods ranks in the order in which it makes them. The plan's ranks belong to
machines instead, so that each pod finds its rank by the name of its node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.launchers.job import Component, LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.kubernetes import (
    config_map,
    gpu_resource,
    kubectl_commands,
    pod_image,
)
from megatron_hetero.flags.launchers.launcher import (
    Action,
    Launcher,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import BY_NAME, HOST_VARIABLE, NAME

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
          tolerations:
            # Nodes with GPUs are often kept for pods that ask for them.
            - {{key: {resource}, operator: Exists, effect: NoSchedule}}
          affinity:
            # The very machines, whose links the plan was made for.
            nodeAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                nodeSelectorTerms:
{terms}          containers:
            # The operator wants this name, and the port's name, whose number it gives to all pods.
            - name: pytorch
              image: {image}
              command: [bash, /hetero/{script}, {by_name}, {name}-master-0]
              env:
                - name: {variable}
                  valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}
              ports:
                - {{name: pytorchjob-port, containerPort: {port}}}
              resources:
                limits:
                  # All of the node's, so that their numbers are the plan's.
                  {resource}: {gpus}
              volumeMounts:
                - {{name: hetero, mountPath: /hetero}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - name: hetero
              configMap: {{name: {name}}}
            - name: shm
              emptyDir: {{medium: Memory}}
"""
# A term may name one node only; a pod goes where one of the terms holds.
_TERM = (
    "                  - matchFields: [{{key: metadata.name, operator: In, values: [{host}]}}]\n"
)


def pytorchjob_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return one manifest that holds the plan, `train.sh` and the PyTorchJob.

    Raises:
        UsageError: there is no image, a wheel is given, or the plan is too large for a ConfigMap.
        UnsupportedError: nodes after the first have unlike numbers or makers of GPUs.
    """
    return (LaunchFile(_FILE, "".join(_parts(job, pod_image(job)))),)


def _parts(job: LaunchJob, image: str) -> Iterator[str]:
    # (host, its component) by rank; the first node is the master.
    nodes = [(host.host, part) for part in job.components for host in part.hosts]
    workers = nodes[1:]
    _check_alike(workers)
    yield from config_map(job, _FILE, "Kubeflow's training operator")
    yield _JOB.format(name=job.name)
    yield _replicas(job, image, "Master", nodes[:1])
    if workers:
        yield _replicas(job, image, "Worker", workers)


def _check_alike(workers: Sequence[tuple[str, Component]]) -> None:
    """Refuse workers that no one pod template describes."""
    limits = {(gpu_resource(part.gpu_type), part.gpus_per_node) for _, part in workers}
    if len(limits) > 1:
        found = "; ".join(
            f"{host}: {part.gpus_per_node} x {part.gpu_type}" for host, part in workers
        )
        raise UnsupportedError(
            "--for pytorchjob: all workers of a PyTorchJob ask for one number of GPUs of one "
            f"maker, and the nodes after the first are unlike ({found}). Launch by --for "
            "kubernetes (a JobSet), Slurm or ssh."
        )


def _replicas(job: LaunchJob, image: str, role: str, nodes: Sequence[tuple[str, Component]]) -> str:
    # All nodes of a role have one template, by the check above.
    part = nodes[0][1]
    return _REPLICAS.format(
        role=role,
        count=len(nodes),
        name=job.name,
        terms="".join(_TERM.format(host=json.dumps(host)) for host, _ in nodes),
        image=json.dumps(image),
        script=NAME,
        by_name=BY_NAME,
        variable=HOST_VARIABLE,
        port=job.master_port,
        resource=gpu_resource(part.gpu_type),
        gpus=part.gpus_per_node,
    )


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    label = f"training.kubeflow.org/job-name={record.name}"
    return kubectl_commands("pytorchjob", label, _FILE, record, action)


PYTORCHJOB = Launcher(
    "pytorchjob",
    pytorchjob_files,
    "kubectl apply -f {folder}/pytorchjob.yaml",
    _commands,
    brings_folder=True,
    takes_image=True,
)
