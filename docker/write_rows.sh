#!/bin/sh
# write_rows.sh FILE: the environments to build, once for all passes. SKIP_<EXTRA>_BUILD=1 leaves out the rows that
# carry the extra. RL_BUILD_TABLE and RL_BUILD_PYTHON name another table or interpreter than the image's.
set -eu
rows=$1
here=$(dirname "$0")
table=${RL_BUILD_TABLE:-$here/rl_actor_envs/table.py}
python=${RL_BUILD_PYTHON:-/opt/rl/python}

# skip VARIABLE VALUE EXTRA…: the extras on standard output if the value says so.
skip() {
    variable=$1 value=$2
    shift 2
    case $value in
    1) echo "$@" ;;
    0 | '') ;;
    *)
        echo "write_rows.sh: $variable is '$value'; set it to 1 or to 0" >&2
        exit 2
        ;;
    esac
}

# Each in an assignment of its own: only there does a failure end the script.
vllm=$(skip SKIP_VLLM_BUILD "${SKIP_VLLM_BUILD:-}" vllm vllm-cpu)
trtllm=$(skip SKIP_TRTLLM_BUILD "${SKIP_TRTLLM_BUILD:-}" trtllm)
mcore=$(skip SKIP_MCORE_BUILD "${SKIP_MCORE_BUILD:-}" mcore)
gym=$(skip SKIP_GYM_BUILD "${SKIP_GYM_BUILD:-}" gym)

# A plain redirect: a pipe or a process substitution would hide that the table failed. The words are meant to split.
# shellcheck disable=SC2086
"$python" -I -S "$table" all $vllm $trtllm $mcore $gym >"$rows"
if ! test -s "$rows"; then
    echo "write_rows.sh: no environment is left to build; skip less" >&2
    exit 1
fi
cat "$rows"
