"""Check launch files by the schema or the dry run of the system that reads them.

    python tools/check_launch_files.py FOLDER --jobset-crd FILE --skypilot-python PYTHON

FOLDER is what `megatron-hetero launch PLAN --for LAUNCHER -o FOLDER` wrote.  What is checked:

Kubernetes: every field of `jobset.yaml` against the schema in JobSet's CustomResourceDefinition
(from github.com/kubernetes-sigs/jobset, config/components/crd/bases/), as the API server does, and
unknown fields refused.  SkyPilot: every task by SkyPilot's own schema of tasks, in a Python that
has `skypilot`.  Slurm: `sbatch --test-only job.sbatch`, where there is an sbatch with its
controller.

Exit code 1: a file was refused.  What could not be checked is named.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

_SKYPILOT = """
import json, sys
import jsonschema
from sky.utils import schemas
jsonschema.validate(json.load(sys.stdin), schemas.get_task_schema())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--jobset-crd", type=Path, metavar="FILE")
    parser.add_argument("--skypilot-python", metavar="PYTHON")
    options = parser.parse_args()
    folder: Path = options.folder
    faults: list[str] = []
    if (folder / "jobset.yaml").exists():
        if options.jobset_crd is None:
            print("jobset.yaml: not checked; give --jobset-crd")
        else:
            faults += jobset_faults(folder / "jobset.yaml", options.jobset_crd)
    for task in sorted(folder.glob("part-*.yaml")):
        if options.skypilot_python is None:
            print(f"{task.name}: not checked; give --skypilot-python")
        else:
            faults += skypilot_faults(task, options.skypilot_python)
    if (folder / "job.sbatch").exists():
        if shutil.which("sbatch") is None:
            print("job.sbatch: not checked; there is no sbatch here")
        else:
            faults += slurm_faults(folder)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def jobset_faults(path: Path, crd: Path) -> list[str]:
    """What the API server would refuse in a JobSet."""
    definition = _read(crd)
    faults = []
    for document in YAML(typ="safe").load_all(path.read_text()):
        if document["kind"] != definition["spec"]["names"]["kind"]:
            continue
        version = document["apiVersion"].rpartition("/")[2]
        schemas = {
            v["name"]: v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"]
        }
        if version not in schemas:
            faults.append(f"{path.name}: apiVersion {version}; served are {', '.join(schemas)}")
            continue
        metadata = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        schema = schemas[version]
        schema = {**schema, "properties": {**schema["properties"], "metadata": metadata}}
        faults += [f"{path.name}: {fault}" for fault in _violations(document, schema, "")]
    return faults


def skypilot_faults(path: Path, python: str) -> list[str]:
    """What SkyPilot's schema refuses in a task."""
    done = subprocess.run(
        [python, "-c", _SKYPILOT],
        input=json.dumps(_read(path)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return []
    return [f"{path.name}: {done.stderr.strip()[-1000:]}"]


def slurm_faults(folder: Path) -> list[str]:
    """What sbatch says of the job, which it does not start."""
    done = subprocess.run(
        ["sbatch", "--test-only", "job.sbatch"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return [] if done.returncode == 0 else [f"job.sbatch: {done.stderr.strip()}"]


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
    """Of a structural schema (apiextensions.k8s.io/v1): types, required and unknown fields, enums,
    patterns, and bounds."""
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
    """A number under a bound."""
    return isinstance(value, int | float) and value < bound


def value_above(value: Any, bound: float) -> bool:
    """A number over a bound."""
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
