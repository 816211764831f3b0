#!/bin/sh
# Print the path of a Python that can run the whole project, or say what to install and exit 1.
#
# Suitable means CPython 3.12 or 3.13 (the versions for which megatron-core has wheels) with `venv`.
# Looked at, in this order: $PYTHON, the PATH, pyenv's versions, the ones that uv manages.
set -u

is_suitable() {
    "$1" -c '
import sys
import ensurepip, venv
raise SystemExit(not (3, 12) <= sys.version_info[:2] <= (3, 13))
' >/dev/null 2>&1
}

candidates() {
    for name in python3.12 python3.13 python3 python; do
        command -v "$name" 2>/dev/null
    done
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions" \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"; do
        for python in "$folder"/*3.12*/bin/python3.12 "$folder"/*3.13*/bin/python3.13; do
            [ -x "$python" ] && printf '%s\n' "$python"
        done
    done
}

if [ -n "${PYTHON:-}" ]; then
    if is_suitable "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "error: PYTHON=$PYTHON is not Python 3.12 or 3.13 with the venv module" >&2
    exit 1
fi

IFS='
'
for python in $(candidates); do
    if is_suitable "$python"; then
        printf '%s\n' "$python"
        exit 0
    fi
done

cat >&2 <<'MESSAGE'
error: no Python 3.12 or 3.13 with the venv module was found (on the PATH, in pyenv, in uv).
Install one, for example
    Debian, Ubuntu    apt install python3.12 python3.12-venv
    Fedora            dnf install python3.12
    any system        uv python install 3.12     or     pyenv install 3.12
or name the one you have:  make demo PYTHON=/path/to/python3.12
MESSAGE
exit 1
