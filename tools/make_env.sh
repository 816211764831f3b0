#!/bin/sh
# Create the virtual environment VENV with the package (editable), its runtime and the tools of its
# developers: the files whose SHA-256 stand in requirements-dev.txt, and no others.
#
#     tools/make_env.sh VENV
#
# TORCH, when set, is installed first and in place of the pinned torch: a wheel, a version, or any
# arguments of `pip install` (a CPU build, for example).
set -eu

venv=$1
root=$(cd "$(dirname "$0")/.." && pwd)

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    echo "error: the training runtime needs Linux on x86-64 (megatron-core has no other wheels)." >&2
    echo "The planner runs here too:  pip install .   and then   megatron-hetero plan --help" >&2
    exit 5
fi

if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$("$root/tools/find_python.sh")
    echo "Creating $venv with $python" >&2
    "$python" -m venv --clear "$venv"
fi

pip() {
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"
}

requirements=$root/requirements-dev.txt
if [ -n "${TORCH:-}" ]; then
    echo "Installing torch from: $TORCH" >&2
    # Unquoted on purpose: TORCH may hold several arguments.
    # shellcheck disable=SC2086
    pip install $TORCH
fi
if "$venv/bin/python" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null; then
    # A torch that is there already stays: the user chose it, or an earlier run installed it.
    requirements=$venv/requirements.txt
    sed '/^# torch, and what it brings/,$d' "$root/requirements-dev.txt" >"$requirements"
else
    echo "Installing torch with its CUDA libraries and the rest: about 6 GB, some minutes." >&2
fi
pip install --no-deps --require-hashes --requirement "$requirements"
pip install --no-deps --no-build-isolation --editable "$root"
