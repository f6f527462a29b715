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

# Gym looks for an environment per server. This one serves all whose requirements it satisfies; for any other Gym
# makes one of its own when it starts.
"$root/bin/python" "$here/gym_servers.py" >"$root/servers.txt"
test -s "$root/servers.txt"
while read -r server; do
    mkdir -p "$root/servers/$server"
    ln -sfn "$root" "$root/servers/$server/.venv"
done <"$root/servers.txt"
