"""Check that engines declare every flag that the launch files of a serving plan give them.

    python tools/check_engine_flags.py vllm-0.33.0-*.whl sglang-0.5.23-*.whl

The wheels are read and not run, so neither CUDA nor their dependencies are needed.  vLLM declares
flags in `engine/arg_utils.py` and, as fields, in its `cli_args.py`; SGLang as fields of
`srt/arg_groups/fields`, one flag for each.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[1] / "megatron_hetero" / "serving" / "launch"
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
DECLARED = {
    "vllm": re.compile(r"vllm/(engine/arg_utils|entrypoints/.*cli_args)\.py"),
    "sglang": re.compile(r"sglang/srt/(server_args|arg_groups/fields/\w+)\.py"),
}
"""Files of an engine's wheel that declare flags."""


def written(engine: str) -> set[str]:
    """Return the flags that `ENGINE_command` of the launch files writes."""
    tree = ast.parse((LAUNCH / f"{engine}.py").read_text(encoding="utf-8"))
    (function,) = (
        node for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == f"{engine}_command"
    )  # fmt: skip
    return _flags(function)


def declared(wheel: Path, engine: str) -> set[str]:
    """Return the flags that an engine's wheel declares."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if DECLARED[engine].fullmatch(name):
                tree = ast.parse(files.read(name))
                found |= _flags(tree) | _fields(tree)
    return found


def _flags(tree: ast.AST) -> set[str]:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and _FLAG.fullmatch(text)}


def _fields(tree: ast.AST) -> set[str]:
    """Return the flag of each field of a class of settings."""
    return {
        f"--{node.target.id.replace('_', '-')}"
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def main(wheels: list[str]) -> int:
    """Print, by wheel, the flags that it does not declare."""
    failed = not wheels
    for name in wheels:
        wheel = Path(name)
        engine = wheel.name.partition("-")[0]
        if engine not in DECLARED:
            print(f"{wheel.name}: neither vLLM nor SGLang")
            return 2
        given = written(engine)
        lacking = sorted(given - declared(wheel, engine))
        failed |= bool(lacking)
        print(f"{wheel.name}: {len(given)} flags, not declared: {', '.join(lacking) or 'none'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
