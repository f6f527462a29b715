"""CPU time of starting the leaf and the bridge: what importing them and running them add to a bare Python.

    python tools/bench/package_start.py [REPEATS]

The measured commands take turns, so that a busy machine slows all of them. Prints medians in milliseconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
LEAF, BRIDGE = PACKAGES / "rl-actor-envs" / "src", PACKAGES / "rl-gym-bridge" / "src"
COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "import rl_actor_envs.runtime": ["-c", "import rl_actor_envs.runtime"],
    "table.py all": [str(LEAF / "rl_actor_envs" / "table.py"), "all"],
    "rl-actor-envs --help": ["-m", "rl_actor_envs", "--help"],
    "import rl_gym_bridge": ["-c", "import rl_gym_bridge"],
    "rl-gym-bridge --help": ["-m", "rl_gym_bridge", "--help"],
}
#: Milliseconds that a command may add.
TARGETS_MS = {"import rl_actor_envs.runtime": 30.0, "table.py all": 30.0, "import rl_gym_bridge": 150.0}


def cpu_ms(words: list[str], environment: dict[str, str]) -> float:
    """User and system milliseconds of one Python process. Raises RuntimeError when it fails."""
    null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(sys.executable, [sys.executable, *words], environment, file_actions=null)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"python {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return (used.ru_utime + used.ru_stime) * 1000


def main(repeats: int) -> int:
    """Print one line per command; return 1 when one adds more than its target."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.pathsep.join(map(str, (LEAF, BRIDGE))),
            "PYTHONPYCACHEPREFIX": cache,
        }
        taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for turn in range(repeats + 1):
            for name, words in COMMANDS.items():
                used = cpu_ms(words, environment)
                # The first turn compiles.
                if turn:
                    taken[name].append(used)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    base = medians["python -c pass"]
    print(f"python {sys.version.split()[0]}, {repeats} repeats, CPU ms (median; beyond the interpreter)")
    for name, median in medians.items():
        print(f"{name:30} {median:7.1f} {median - base:+7.1f}")
    return int(any(medians[name] - base > target for name, target in TARGETS_MS.items()))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
