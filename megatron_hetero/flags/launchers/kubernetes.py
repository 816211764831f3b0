"""Kubernetes: a JobSet with replicated jobs for the first node and for each kind of node after it.

Pods find the first node by the name that JobSet's headless service gives it,
`<jobset>-<replicated job>-<job index>-<pod index>.<jobset>` (jobset.x-k8s.io/v1alpha2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hetero.flags.launchers.job import Component, LaunchFile, LaunchJob, indented
from megatron_hetero.flags.launchers.launcher import (
    Action,
    Launcher,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.pod import kubectl_commands, pod_files, pod_image, pod_spec
from megatron_hetero.plan.plan import Host

_FILE = "jobset.yaml"
_JOBSET = """\
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    # JobSet makes the headless service; the first pod is found before all are ready.
    enableDNSHostnames: true
    subdomain: {name}
    publishNotReadyAddresses: true
  # A plan has no spare place: with one pod lost all start again, from the last checkpoint.
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
"""
_JOB = """\
    - name: part{index}
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {count}
          parallelism: {count}
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
"""


def kubernetes_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return one manifest that holds the plan, `train.sh` and the JobSet.

    Raises:
        UsageError: there is no image, a wheel is given, or the plan is too large for a ConfigMap.
        UnsupportedError: a node has GPUs of several makers.
    """
    return (pod_files(job, _FILE, "JobSet", _parts(job, pod_image(job))),)


def _parts(job: LaunchJob, image: str) -> Iterator[str]:
    yield _JOBSET.format(name=job.name)
    first, *others = job.components
    # The first node by itself: its pod, which all others call, has a name of its own.
    groups = [(first.hosts[:1], first), (first.hosts[1:], first)]
    groups += [(component.hosts, component) for component in others]
    for index, (hosts, component) in enumerate(group for group in groups if group[0]):
        yield _job(job, index, hosts, component, image)


def _job(
    job: LaunchJob, index: int, hosts: Sequence[Host], component: Component, image: str
) -> str:
    master = f"{job.name}-part0-0-0.{job.name}"
    pod = pod_spec(job, hosts, component, image=image, master=master)
    return _JOB.format(index=index, count=len(hosts)) + indented(pod, 14)


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    label = f"jobset.sigs.k8s.io/jobset-name={record.name}"
    return kubectl_commands("jobset", label, _FILE, record, action)


KUBERNETES = Launcher(
    "kubernetes",
    kubernetes_files,
    f"kubectl apply -f {{folder}}/{_FILE}",
    _commands,
    brings_folder=True,
    takes_image=True,
)
