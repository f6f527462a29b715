#!/bin/sh
# install_release.sh: the workspace's members into every environment, commands for them, and the fingerprint.
set -eu
source=${RL_ACTOR_ENVS_WORKSPACE:-/opt/rl/src}
rows=${RL_BUILD_ROWS:-/opt/rl/rows.tsv}
python=${RL_BUILD_PYTHON:-/opt/rl/python}
driver=${RL_BUILD_DRIVER:-/opt/rl/driver}
commands=${RL_BUILD_COMMANDS:-/usr/local/bin}
fingerprint=${RL_BUILD_FINGERPRINT:-/opt/rl/fingerprint.json}

if test -f /run/secrets/uv-config; then
    export UV_CONFIG_FILE=/run/secrets/uv-config
fi
# Linking into the lower layer's cache would copy it up.
UV_CACHE_DIR=$(mktemp -d)
export UV_CACHE_DIR
trap 'rm -rf "$UV_CACHE_DIR"' EXIT
# A checkout keeps the rights that its owner's umask gave; the image runs as any user.
find "$source" ! -type l ! -perm -004 -exec chmod a+rX {} +
export PYTHONPATH="$source/packages/rl-actor-envs/src" PYTHONDONTWRITEBYTECODE=1

status=0
# The members alone: packages that the layers below lack are a fault, not something to install here.
"$python" -m rl_actor_envs prefetch --rows "$rows" --phase members || status=$?
"$python" -m rl_actor_envs driver "$driver" --phase members || status=$?
test "$status" = 0 || exit "$status"

"$python" -m rl_actor_envs wrappers "$commands" --rows "$rows"
for command in grpo rl-actor-envs; do
    ln -sf "$driver/bin/$command" "$commands/$command"
done
"$python" -m compileall -q "$source/packages" "$source/apps"
"$python" -m rl_actor_envs fingerprint --write "$fingerprint"
# Where jobs start, and write `runs/` unless told otherwise, whoever the user is.
mkdir -p "${RL_BUILD_WORK:-/work}"
chmod 1777 "${RL_BUILD_WORK:-/work}"

if test -n "${GYM_PYTHON:-}"; then
    sh "$source/docker/install_gym.sh" "$GYM_PYTHON"
fi
