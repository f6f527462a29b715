"""CPU time of starting `rl-actor-envs`: what importing it, and its table as a script, add to a bare Python.

    python tools/bench/leaf_start.py [REPEATS]

The measured commands take turns, so that a busy machine slows all of them. Prints medians in milliseconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "packages" / "rl-actor-envs" / "src"
TARGET_MS = 30.0
COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "import rl_actor_envs.runtime": ["-c", "import rl_actor_envs.runtime"],
    "table.py all": [str(SOURCE / "rl_actor_envs" / "table.py"), "all"],
    "rl-actor-envs --help": ["-m", "rl_actor_envs", "--help"],
}


def cpu_ms(words: list[str], environment: dict[str, str]) -> float:
    """User and system milliseconds of one Python process. Raises RuntimeError when it fails."""
    null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(sys.executable, [sys.executable, *words], environment, file_actions=null)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"python {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return (used.ru_utime + used.ru_stime) * 1000


def main(repeats: int) -> int:
    """Print one line per command; return 1 when the import or the script adds more than the target."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(SOURCE),
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
    judged = ("import rl_actor_envs.runtime", "table.py all")
    return int(any(medians[name] - base > TARGET_MS for name in judged))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
