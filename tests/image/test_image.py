"""The image for CPUs, built for real: what is in it works; a source edit rebuilds the last layer alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.image.build import LEFT_OUT
from tools.image.buildah import ImageError
from tools.image.smoke import smoke_test

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ACTOR = "rl_app_core.workers.ColocatedWorker"


@pytest.fixture
def edited(built, tmp_path) -> Path:
    """A second copy of the checkout, to change."""
    return Path(shutil.copytree(built.checkout, tmp_path / "edited", copy_function=shutil.copy2))


def test_what_is_in_the_image_works_and_is_this_checkout(built):
    held = smoke_test(built.buildah, built.checkout, built.tag, skip=LEFT_OUT)
    assert any(line.startswith("python-ColocatedWorker imports") for line in held)
    assert any(line.startswith("python-NemoGym imports") for line in held)
    assert any(line.startswith("grpo run trains") for line in held)


def test_every_package_is_linked_and_not_copied(built):
    """Cache, both policy workers' environments and driver's share their files; Gym's actor has some, too."""
    assert built.report.links.get(4, 0) > 10_000
    assert built.report.links.get(5, 0) > 1_000
    assert max(built.report.links) == 5


def test_a_source_edit_rebuilds_the_release_layer_alone(built, edited):
    assert {stage for stage, steps in built.report.ran.items() if steps} == {
        "base",
        "dependencies",
        "trtllm",
        "release",
    }
    module = edited / "packages/rl-algorithms/src/rl_algorithms/metrics.py"
    module.write_text(module.read_text() + "\n# changed\n")
    report, _ = built.again(edited)
    assert {stage for stage, steps in report.ran.items() if steps} == {"release"}
    with built.buildah.container(f"{built.tag}-again") as container:
        shown = built.buildah.execute(
            container, ["tail", "-1", "/opt/rl/src/packages/rl-algorithms/src/rl_algorithms/metrics.py"]
        )
    assert shown == "# changed\n"


def test_a_changed_lock_is_a_fingerprint_mismatch_inside(built):
    with built.buildah.container(built.tag) as container:
        inside = ["sh", "-c", "echo '# moved' >>/opt/rl/src/uv.lock && grpo validate"]
        with pytest.raises(ImageError, match=r"ended with 2:[\s\S]*uv\.lock"):
            built.buildah.execute(container, inside, env={"HOME": "/tmp"})


def test_an_environment_that_cannot_be_installed_fails_the_build_by_name(built, edited):
    """A wrong hash in the lock: all environments with the package are attempted, all are named."""
    lock = edited / "uv.lock"
    before, name, after = lock.read_text().partition('[[package]]\nname = "safetensors"')
    block, _, rest = after.partition("[[package]]")
    assert block.count("sha256:") > 3
    lock.write_text(
        before + name + re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, block) + "[[package]]" + rest
    )
    with pytest.raises(ImageError) as caught:
        built.again(edited)
    said = str(caught.value)
    assert f"{ACTOR} (mcore)" in said
    assert "rl_policy_megatron.group.rank.PolicyRank (mcore)" in said
    assert "driver" in said
    assert said.count("FAILED") == 3
    assert "hash mismatch" in said.lower()


NOWHERE = "http://127.0.0.1:9/simple"


@pytest.mark.parametrize(
    ("secret", "text", "stage", "changed", "said"),
    [
        (
            "pip-config",
            f"[global]\nretries = 0\nindex-url = {NOWHERE}\n",
            "base",
            "PYTHON=python3.11",
            "No matching distribution found for uv",
        ),
        ("uv-config", f'index-url = "{NOWHERE}"\n', "dependencies", "SKIP_TRTLLM_BUILD=", NOWHERE),
    ],
    ids=["pip", "uv"],
)
def test_the_mirrors_are_those_of_the_secrets(built, tmp_path, secret, text, stage, changed, said):
    """A build that asks where nothing answers fails; the changed argument makes the step run again."""
    (tmp_path / "file").write_text(text)
    flags = [
        *("--build-arg", f"BASE_IMAGE={built.base}", "--build-arg", changed, "--target", stage),
        *("--secret", f"id={secret},src={tmp_path / 'file'}"),
    ]
    dockerfile = built.checkout / "docker" / "Dockerfile"
    with pytest.raises(ImageError, match=re.escape(said)):
        built.buildah.build(built.checkout, dockerfile, "localhost/rl-mirror", *flags)


def test_skipping_everything_and_unknown_values_fail_the_build(built):
    with pytest.raises(ImageError, match="no environment is left to build"):
        built.again(built.checkout, skip=("vllm", "trtllm", "mcore", "gym"), target="dependencies")
