"""`python -m tools.image base|build|smoke`: the image for CPUs, built without a daemon and tried out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.image.base import TAG as BASE_TAG
from tools.image.base import ensure_base
from tools.image.build import LEFT_OUT, SKIPPABLE, BuildReport, build_image, local_wheels
from tools.image.buildah import Buildah, ImageError, unavailable
from tools.image.smoke import smoke_test

ROOT = Path(__file__).resolve().parents[2]
TAG = "localhost/rl:cpu"


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return 0, or 1 after one message on stderr."""
    options = _parser().parse_args(arguments)
    buildah = Buildah(options.storage)
    try:
        reason = unavailable()
        if reason is not None:
            raise ImageError(reason)
        if options.verb == "base":
            print(ensure_base(buildah, ROOT))
            return 0
        if options.verb == "build":
            _build(buildah, options)
        _smoke(buildah, options)
    except ImageError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


def _build(buildah: Buildah, options: argparse.Namespace) -> None:
    base = options.base or ensure_base(buildah, ROOT)
    report, log = build_image(
        buildah, ROOT, base=base, tag=options.tag, skip=options.skip, wheels=local_wheels()
    )
    if options.log is not None:
        options.log.write_text(log)
    if options.report is not None:
        options.report.write_text(report.to_json() + "\n")
    print(_table(options.tag, report))


def _smoke(buildah: Buildah, options: argparse.Namespace) -> None:
    for line in smoke_test(buildah, ROOT, options.tag, skip=options.skip):
        print(f"ok         {line}")


def _table(tag: str, report: BuildReport) -> str:
    links = ", ".join(f"{count} with {number}" for number, count in report.links.items())
    ran = "; ".join(f"{stage} {len(steps)}" for stage, steps in report.ran.items() if steps) or "none"
    return (
        f"image      {tag}, {report.size}, built in {report.seconds:.0f} s\n"
        f"links      {report.linked_files} files are shared by hard links ({links})\n"
        f"steps run  {ran}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.image", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    base = verbs.add_parser("base", help=f"assemble {BASE_TAG} from Debian's packages")
    build = verbs.add_parser("build", help="build the image, then try it out")
    smoke = verbs.add_parser("smoke", help="try an image out")
    for verb in (base, build, smoke):
        verb.add_argument("--storage", type=Path, help="where buildah keeps images; by default its own place")
    for verb in (build, smoke):
        verb.add_argument("--tag", default=TAG)
        verb.add_argument(
            "--skip", nargs="*", choices=SKIPPABLE, default=list(LEFT_OUT), help="by default vllm trtllm"
        )
    build.add_argument("--base", help=f"image to build on; by default {BASE_TAG}, assembled here")
    build.add_argument("--report", type=Path, metavar="FILE", help="write seconds, size and links as JSON")
    build.add_argument("--log", type=Path, metavar="FILE", help="write buildah's log")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
