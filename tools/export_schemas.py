"""Write the JSON Schemas of the project's files to docs/schemas/, for editors.

    python tools/export_schemas.py [--check]

With `--check` nothing is written, and the exit code is 1 where a committed schema is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.file.description import cluster_json_schema
from megatron_hetero.cost.work.profile import profile_json_schema
from megatron_hetero.files import write_json
from megatron_hetero.plan.file import plan_json_schema
from megatron_hetero.serving.fleet.file import serving_plan_json_schema
from megatron_hetero.serving.workload.schema import request_mix_json_schema

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"
SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "cluster.schema.json": cluster_json_schema,
    "plan.schema.json": plan_json_schema,
    "profile.schema.json": profile_json_schema,
    "serve.schema.json": serving_plan_json_schema,
    "workload.schema.json": request_mix_json_schema,
}


def stale_schemas(folder: Path = FOLDER) -> list[str]:
    """Find the schemas whose file in `folder` is missing or differs from the code."""
    return [name for name, schema in SCHEMAS.items() if _committed(folder / name) != schema()]


def _committed(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> int:
    """Write the schemas, or check them."""
    parser = argparse.ArgumentParser(description="Export the JSON Schemas to docs/schemas/.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    if parser.parse_args().check:
        stale = stale_schemas()
        for name in stale:
            print(f"docs/schemas/{name} is out of date: run `make schemas`", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schema in SCHEMAS.items():
        write_json(FOLDER / name, schema())
        print(f"docs/schemas/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
