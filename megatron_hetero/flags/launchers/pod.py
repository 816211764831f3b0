"""Pods of Kubernetes that train: what JobSet and PyTorchJob share.

Each pod finds its rank by the name of its node, since the plan's ranks belong to machines and
Kubernetes chooses which pod of a template comes to which of them. The pod with rank 0 has to be
known by name before it runs: launchers give the first node a template of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.launchers.job import (
    Component,
    LaunchFile,
    LaunchJob,
    indented,
)
from megatron_hetero.flags.launchers.launcher import (
    LOG_LINES,
    Action,
    LauncherCommand,
    LaunchRecord,
)
from megatron_hetero.flags.launchers.node_script import (
    BY_NAME,
    HOST_VARIABLE,
    NAME,
    PLAN_NAME,
    node_script,
)
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.plan import Host

_MOST_BYTES = 1 << 20
"""Limit of a ConfigMap (https://kubernetes.io/docs/concepts/configuration/configmap/)."""

_CONFIG_MAP = """\
# kubectl apply -f {file}        needs {operator}, and the operator of the GPUs' maker
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
"""
_POD = """\
tolerations:
  # Nodes with GPUs are often kept for pods that ask for them.
  - {{key: {resource}, operator: Exists, effect: NoSchedule}}
affinity:
  # The very machines, whose links the plan was made for.
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
{terms}containers:
{note}  - name: {container}
    image: {image}
    command: [bash, /hetero/{script}, {by_name}, {master}]
    env:
      - name: {variable}
        valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}
    ports:
      # The rendezvous is on the first pod; NCCL and gloo take ports of their own.
      - {{name: {port_name}, containerPort: {port}}}
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
_TERM = "        - matchFields: [{{key: metadata.name, operator: In, values: [{host}]}}]\n"


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


def pod_files(job: LaunchJob, file: str, operator: str, objects: Iterator[str]) -> LaunchFile:
    """Return a manifest: a ConfigMap with the plan and `train.sh`, then the operator's objects.

    Args:
        job: the job, whose name the ConfigMap takes.
        file: name of the manifest.
        operator: what the cluster needs for the objects behind the ConfigMap.
        objects: text of these objects.
    Raises:
        UsageError: the plan is too large.
    """
    return LaunchFile(file, "".join((*_config_map(job, file, operator), *objects)))


def _config_map(job: LaunchJob, file: str, operator: str) -> Iterator[str]:
    yield _CONFIG_MAP.format(name=job.name, file=file, operator=operator)
    plan_text = json.dumps(plan_to_data(job.plan), indent=1, sort_keys=True)
    _check_size(plan_text)
    # Pods have host names of Kubernetes', so that `train.sh` says each node's name itself.
    texts = {NAME: node_script(job, exports_names=True).text, PLAN_NAME: plan_text}
    for name, text in texts.items():
        yield f"  {name}: |\n"
        yield indented(text.splitlines(), 4)


def _check_size(plan_text: str) -> None:
    # 64 KiB are kept for the script and for what Kubernetes adds.
    num_bytes = len(plan_text.encode()) + (64 << 10)
    if num_bytes > _MOST_BYTES:
        raise UsageError(
            f"the plan and its script are {num_bytes} bytes, and a ConfigMap holds {_MOST_BYTES}; "
            "launch by Slurm or ssh"
        )


def pod_spec(
    job: LaunchJob,
    hosts: Sequence[Host],
    component: Component,
    *,
    image: str,
    master: str,
    container: str = "train",
    port_name: str = "rendezvous",
    note: str = "",
) -> list[str]:
    """Return the lines of a pod that may run on each of some nodes.

    Args:
        job: the job.
        hosts: the nodes.
        component: a component of such nodes, which says their GPUs.
        image: image of the container.
        master: name by which pods find the first one.
        container: name of the container.
        port_name: name of the rendezvous' port.
        note: comment above the container.
    """
    return _POD.format(
        name=job.name,
        terms="".join(_TERM.format(host=json.dumps(host.host)) for host in hosts),
        container=container,
        note=f"  # {note}\n" if note else "",
        image=json.dumps(image),
        script=NAME,
        by_name=BY_NAME,
        master=master,
        variable=HOST_VARIABLE,
        port_name=port_name,
        port=job.master_port,
        resource=component_resource(component),
        gpus=component.gpus_per_node,
    ).splitlines()


def gpu_resource(gpu_type: str) -> str:
    """Return the name under which the maker's device plug-in offers its GPUs."""
    if gpu_type.startswith("MI"):
        return "amd.com/gpu"
    return "habana.ai/gaudi" if gpu_type.startswith("Gaudi") else "nvidia.com/gpu"


def component_resource(component: Component) -> str:
    """Return the name under which the GPUs of a component's nodes are asked for.

    Raises:
        UnsupportedError: a node has GPUs of two makers.
    """
    resources = {gpu_resource(name) for name in component.gpu_types}
    if len(resources) > 1:
        raise UnsupportedError(
            f"machine {component.hosts[0].node} has GPUs of several makers ({component.kind}), and "
            "a pod would need a device plug-in of each; launch by ssh"
        )
    return resources.pop()


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
        # kubectl follows five pods unless it is told otherwise.
        most = str(max(5, len(record.hosts)))
        words = ("--selector", label, "--prefix", "--tail", LOG_LINES, "--max-log-requests", most)
        yield LauncherCommand(("kubectl", "logs", *words))
    else:
        yield LauncherCommand(("kubectl", "delete", "--filename", file))
