"""Test both ends of the supported range of megatron-core, each in a folder of its own.

    python tools/megatron_range.py                        # 0.19.0 and 0.19.2
    python tools/megatron_range.py --versions 0.19.0 --tests tests/runtime/test_equality.py

Downloads each wheel with pip, without its dependencies, into build/megatron; compares the guarded
symbols (`tools/canary.py`) and runs the tests with that Megatron before the installed one on the
path.  Exits with 1 where a symbol is unknown or a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_hetero.model.megatron_release import FIRST, LAST
from tools.canary import changes

ROOT = Path(__file__).resolve().parents[1]

ENDS = (FIRST, LAST)
TESTS = (
    "tests/runtime/megatron",
    "tests/runtime/test_equality.py",
    "tests/runtime/test_symmetric.py",
)


def unpacked(version: str, folder: Path) -> Path:
    """Return the folder of a release's wheel, downloaded and unpacked where it is not there yet."""
    target = folder / version
    if not (target / "megatron").is_dir():
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        wanted = ["--only-binary", ":all:", "--dest", str(wheels), f"megatron-core=={version}"]
        subprocess.run([*pip, *wanted], check=True)
        (wheel,) = wheels.glob(f"megatron_core-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


def main() -> int:
    """Test the versions of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=ENDS)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    options = parser.parse_args()
    from megatron_hetero.runtime.megatron.guards import guarded

    code = 0
    for version in options.versions:
        folder = unpacked(version, ROOT / "build" / "megatron")
        unknown = changes(folder, guarded())
        print(f"megatron-core {version}: {len(unknown)} guarded symbols are unknown", flush=True)
        print("".join(f"  {line}\n" for line in unknown), end="", flush=True)
        path = os.pathsep.join([str(folder), str(ROOT)])
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options.tests]
        done = subprocess.run(tests, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False)
        code = max(code, int(bool(unknown)), int(done.returncode != 0))
    return code


if __name__ == "__main__":
    sys.exit(main())
