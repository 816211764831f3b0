"""Kubernetes: a JobSet with one replicated job for each kind of node; the plan in a ConfigMap.

Pods find the first node by the name that JobSet's headless service gives it,
`<jobset>-<replicated job>-<job index>-<pod index>.<jobset>` (jobset.x-k8s.io/v1alpha2).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.job import Component, LaunchFile, LaunchJob, indented
from megatron_hetero.flags.launchers.launcher import (
    LOG_LINES,
    Action,
    Launcher,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import NAME, PLAN_NAME, node_script
from megatron_hetero.plan.file import plan_to_data

_MOST_BYTES = 1 << 20
"""Limit of a ConfigMap (https://kubernetes.io/docs/concepts/configuration/configmap/)."""

_HEAD = """\
# kubectl apply -f {file}        needs {operator}, and the operator of the GPUs' maker
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
"""
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
              tolerations:
                # Nodes with GPUs are often kept for pods that ask for them.
                - {{key: {resource}, operator: Exists, effect: NoSchedule}}
              affinity:
                # The very machines, whose links the plan was made for; they are alike, and which of
                # them takes which rank is left to Kubernetes.
                nodeAffinity:
                  requiredDuringSchedulingIgnoredDuringExecution:
                    nodeSelectorTerms:
                      - matchExpressions:
                          - key: kubernetes.io/hostname
                            operator: In
                            values: {hosts}
              containers:
                - name: train
                  image: {image}
                  command:
                    - bash
                    - -c
                    - exec bash /hetero/{script} $(({first} + JOB_COMPLETION_INDEX)) {master}
                  ports:
                    # The rendezvous is on the first pod; NCCL and gloo take ports of their own.
                    - {{name: rendezvous, containerPort: {port}}}
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


def kubernetes_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return one manifest that holds the plan and `train.sh`.

    Raises:
        UsageError: there is no image, a wheel is given, or the plan is too large for a ConfigMap.
    """
    return (LaunchFile("jobset.yaml", "".join(_parts(job, pod_image(job)))),)


def pod_image(job: LaunchJob) -> str:
    """Return the image of a job's pods, which has megatron-hetero in it.

    Raises:
        UsageError: there is no image, or a wheel is given.
    """
    if job.image is None:
        raise UsageError(
            "--image is missing: the container image that has megatron-hetero in it "
            "(`make image` builds one)"
        )
    if job.is_installed_by_script:
        raise UsageError(
            "--wheel: pods have what their image has; build it in (`make image`), and leave --wheel"
        )
    return job.image


def config_map(job: LaunchJob, file: str, operator: str) -> Iterator[str]:
    """Yield the lines of a ConfigMap with the plan and `train.sh`.

    Args:
        job: the job, whose name the ConfigMap takes.
        file: the manifest that the lines begin.
        operator: what the cluster needs for the objects behind the ConfigMap.
    Raises:
        UsageError: the plan is too large.
    """
    yield _HEAD.format(name=job.name, file=file, operator=operator)
    plan_text = json.dumps(plan_to_data(job.plan), indent=1, sort_keys=True)
    _check_size(plan_text)
    # Pods are named by Kubernetes, so that `train.sh` says each node's name itself.
    texts = {NAME: node_script(job, hosts_are_rented=True).text, PLAN_NAME: plan_text}
    for name, text in texts.items():
        yield f"  {name}: |\n"
        yield indented(text.splitlines(), 4)


def _parts(job: LaunchJob, image: str) -> Iterator[str]:
    yield from config_map(job, "jobset.yaml", "JobSet")
    yield _JOBSET.format(name=job.name)
    for component in job.components:
        yield _job(job, component, image)


def _check_size(plan_text: str) -> None:
    # 64 KiB are kept for the script and for what Kubernetes adds.
    num_bytes = len(plan_text.encode()) + (64 << 10)
    if num_bytes > _MOST_BYTES:
        raise UsageError(
            f"the plan and its script are {num_bytes} bytes, and a ConfigMap holds {_MOST_BYTES}; "
            "launch by Slurm or ssh"
        )


def gpu_resource(gpu_type: str) -> str:
    """Return the name under which the maker's device plug-in offers its GPUs."""
    if gpu_type.startswith("MI"):
        return "amd.com/gpu"
    return "habana.ai/gaudi" if gpu_type.startswith("Gaudi") else "nvidia.com/gpu"


def _job(job: LaunchJob, component: Component, image: str) -> str:
    return _JOB.format(
        name=job.name,
        index=component.index,
        count=len(component.hosts),
        hosts=json.dumps([host.host for host in component.hosts]),
        image=json.dumps(image),
        script=NAME,
        first=component.first_node_rank,
        master=f"{job.name}-part0-0-0.{job.name}",
        gpus=component.gpus_per_node,
        resource=gpu_resource(component.gpu_type),
        port=job.master_port,
    )


def pod_logs(record: LaunchRecord, label: str) -> LauncherCommand:
    """Return the command that shows the logs of a job's pods, which bear a label."""
    # kubectl follows five pods unless it is told otherwise.
    most = str(max(5, len(record.hosts)))
    words = ("--selector", label, "--prefix", "--tail", LOG_LINES, "--max-log-requests", most)
    return LauncherCommand(("kubectl", "logs", *words))


def kubectl_commands(
    kind: str, label: str, file: str, record: LaunchRecord, action: Action
) -> Iterator[LauncherCommand]:
    """Yield the commands of an action on a job.

    Args:
        kind: the job's kind, as kubectl names the kind.
        label: the selector of the job's pods.
        file: the manifest.
        record: the job.
        action: what to do.
    """
    if action == "status":
        yield LauncherCommand(("kubectl", "get", kind, record.name))
        yield LauncherCommand(("kubectl", "get", "pods", "--selector", label, "--output", "wide"))
    elif action == "logs":
        yield pod_logs(record, label)
    else:
        yield LauncherCommand(("kubectl", "delete", "--filename", file))


def _commands(folder: Path, record: LaunchRecord, action: Action) -> Iterator[LauncherCommand]:
    label = f"jobset.sigs.k8s.io/jobset-name={record.name}"
    return kubectl_commands("jobset", label, "jobset.yaml", record, action)


KUBERNETES = Launcher(
    "kubernetes",
    kubernetes_files,
    "kubectl apply -f {folder}/jobset.yaml",
    _commands,
    brings_folder=True,
    takes_image=True,
)
