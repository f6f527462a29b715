#!/bin/sh
# install_uv.sh PYTHON: the uv that builds everything else, every file checked against its hash.
set -eu
python=$1
here=$(dirname "$0")

if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "install_uv.sh: the base image needs Python 3.11 or newer with its venv module as $python;" \
        "choose another BASE_IMAGE, or name the interpreter with --build-arg PYTHON=…" >&2
    exit 1
fi
if ! command -v cc >/dev/null || ! "$python" -c 'import os, sysconfig as s
os.stat(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null; then
    echo "install_uv.sh: the base image needs a C compiler (cc) and the headers of $python: some of the locked" \
        "packages are published as source only; on Debian, install gcc and libpython3-dev" >&2
    exit 1
fi
if test -f /run/secrets/pip-config; then
    export PIP_CONFIG_FILE=/run/secrets/pip-config
fi
"$python" -m venv /opt/rl/tools
/opt/rl/tools/bin/python -m pip install --quiet --no-cache-dir --no-deps --require-hashes \
    --requirement "$here/image.txt"
ln -sf /opt/rl/tools/bin/uv /usr/local/bin/uv
# The interpreter of every environment.
ln -sf "$(command -v "$python")" /opt/rl/python
