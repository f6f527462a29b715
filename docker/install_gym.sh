#!/bin/sh
# install_gym.sh PYTHON: NeMo Gym with its servers in one environment at /opt/rl/gym. PYTHON is 3.12 or newer.
set -eu
python=$1
here=$(dirname "$0")
root=${RL_BUILD_GYM:-/opt/rl/gym}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "install_gym.sh: GYM_PYTHON=$python is no Python 3.12 or newer of the base image" >&2
    exit 1
fi
uv venv --quiet --no-project --no-python-downloads --python "$python" "$root"
uv pip sync --quiet --require-hashes --python "$root/bin/python" "$here/gym.txt"

"$root/bin/python" "$here/gym_servers.py" --link >"$root/servers.txt"
test -s "$root/servers.txt"
