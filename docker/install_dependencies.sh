#!/bin/sh
# install_dependencies.sh deps|trtllm: the third-party packages of that stage's environments, and of the driver's.
# All are attempted; one that fails is named at the end and fails the build.
set -eu
stage=$1
here=$(dirname "$0")
rows=${RL_BUILD_ROWS:-/opt/rl/rows.tsv}
python=${RL_BUILD_PYTHON:-/opt/rl/python}
driver=${RL_BUILD_DRIVER:-/opt/rl/driver}

case $stage in
deps | trtllm) ;;
*)
    echo "install_dependencies.sh: unknown stage '$stage'; use deps or trtllm" >&2
    exit 2
    ;;
esac

# A choice of torch's build; unset, the lock's hash decides.
if ls /opt/rl/wheels/*.whl >/dev/null 2>&1; then
    export UV_FIND_LINKS=/opt/rl/wheels
fi
if test -f /run/secrets/uv-config; then
    export UV_CONFIG_FILE=/run/secrets/uv-config
fi
# In this layer, so that environments are linked to it; a later process that builds has the user's own cache.
export UV_CACHE_DIR="${UV_CACHE_DIR:-/opt/rl/uv-cache}"
# Nothing is written when the image runs, under whatever user.
export UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-1}"
export PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1

status=0
"$python" -m rl_actor_envs prefetch --rows "$rows" --stage "$stage" --phase dependencies || status=$?
if test "$stage" = deps; then
    "$python" -m rl_actor_envs driver "$driver" --phase dependencies || status=$?
fi
exit "$status"
