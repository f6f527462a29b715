"""How old the groups of each step were: an SVG from a run's ``trained.jsonl``.

python -m tools.plots.staleness RUN_DIR > docs/images/staleness.svg
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 60, 40


def svg(lines: list[dict[str, object]], title: str) -> str:
    """One dot per step and age; its area says how many groups there were."""
    dots: Counter[tuple[int, int]] = Counter()
    for line in lines:
        step = int(str(line["step"]))
        for group in line["groups"]:  # type: ignore[attr-defined]
            dots[step, step - 1 - group["oldest"]] += 1
    steps = max((step for step, _ in dots), default=1)
    oldest = max((age for _, age in dots), default=0)
    largest = max(dots.values(), default=1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * step / (steps + 1)

    def y(age: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 40) * (age + 0.5) / (oldest + 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#444">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for age in range(oldest + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(age):.1f}" y2="{y(age):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 12}" y="{y(age) + 4:.1f}" text-anchor="end">{age}</text>'
        )
    for step in range(0, steps + 1, max(1, steps // 10)):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{step}</text>')
    for (step, age), count in sorted(dots.items()):
        radius = 6.0 * (count / largest) ** 0.5
        parts.append(
            f'<circle cx="{x(step):.1f}" cy="{y(age):.1f}" r="{radius:.1f}" fill="#1f77b4" '
            'fill-opacity="0.7">'
            f"<title>step {step}: {count} groups of age {age}</title></circle>"
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" '
        'text-anchor="middle">steps since its oldest token</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    run = Path(sys.argv[1])
    lines = [json.loads(line) for line in (run / "trained.jsonl").read_text().splitlines()]
    sys.stdout.write(svg(lines, "Age of the trained groups"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
