#!/bin/sh
# install_gym.sh PYTHON: NeMo Gym with its servers in one environment at /opt/rl/gym. PYTHON is 3.12 or newer.
set -eu
python=$1
here=$(dirname "$0")
root=${GYM_ROOT:-/opt/rl/gym}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "install_gym.sh: GYM_PYTHON=$python is no Python 3.12 or newer of the base image" >&2
    exit 1
fi
uv venv --quiet --no-project --no-python-downloads --python "$python" "$root"
uv pip install --quiet --python "$root/bin/python" --requirement "$here/gym.txt"

# Gym looks for an environment per server; one serves them all.
servers=$root/servers
link() {
    mkdir -p "$servers/$1/$2"
    ln -sfn "$root" "$servers/$1/$2/.venv"
}
packages=$("$root/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for kind in resources_servers responses_api_agents responses_api_models; do
    for server in "$packages/$kind"/*/; do
        test -f "$server/app.py" && link "$kind" "$(basename "$server")"
    done
done
