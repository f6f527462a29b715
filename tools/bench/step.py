"""Where the time of a training step goes: shares of a finished run, as JSON.

    python -m tools.bench.step RUN_DIR

Steps with a measurement or a checkpoint are kept apart: ``other`` of the plain ones is what the loop itself
costs (verifying, advantages, batches, metrics, logs).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any


def split(run: Path) -> dict[str, Any]:
    """Median seconds per plain step by part, their shares, and the shares of the whole run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["step"]: record for record in map(json.loads, lines)}
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    # The line of a step is written before its checkpoint, so that time falls into the next step.
    plain = [
        step
        for step in sorted(records)
        if step > 1
        and "held_out/accuracy" not in records[step]
        and "held_out/accuracy" not in records[step - 1]
    ]
    if not plain:
        raise SystemExit(f"{run} has no step without a measurement before or in it")
    seconds = {
        "generation": median(records[step]["seconds_generation"] for step in plain),
        "training": median(records[step]["seconds_training"] for step in plain),
        "step": median(records[step]["seconds"] - records[step - 1]["seconds"] for step in plain),
    }
    seconds["other"] = max(seconds["step"] - seconds["generation"] - seconds["training"], 0.0)
    return {
        "plain_steps": len(plain),
        "seconds_per_step": {name: round(value, 4) for name, value in seconds.items()},
        "share_of_step": {
            name: round(seconds[name] / seconds["step"], 3) for name in ("generation", "training", "other")
        },
        "share_of_run": {
            "generation": round(summary["seconds_generation"] / summary["seconds"], 3),
            "training": round(summary["seconds_training"] / summary["seconds"], 3),
            "before_first_step": round(records[0]["seconds"] / summary["seconds"], 3),
        },
        "tokens_per_second_of_generation": round(summary["tokens"] / summary["seconds_generation"]),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tools.bench.step RUN_DIR")
    print(json.dumps(split(Path(sys.argv[1])), indent=2))
