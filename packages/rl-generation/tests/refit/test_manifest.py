"""What is announced, what is expected, and the account of what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_generation.failures import RefitError
from rl_generation.protocol import RefitSpec, RefitTensor
from rl_generation.refit.contract import Bucket, TensorPlace, manifest_digest
from rl_generation.refit.manifest import (
    TIED_HEAD,
    RefitProgress,
    require_fit,
    spec_of,
    spec_of_tensors,
)

EMBED = RefitTensor("model.embed_tokens.weight", (8, 4), torch.float32)
NORM = RefitTensor("model.norm.weight", (4,), torch.float32)
HEAD = RefitTensor("lm_head.weight", (8, 4), torch.float32)
SPEC = RefitSpec((EMBED, NORM))


def bucket_of(*tensors: RefitTensor) -> Bucket:
    """A bucket that says it carries these; its bytes are of no interest."""
    places = tuple(TensorPlace(t.name, t.shape, str(t.dtype).removeprefix("torch."), 0) for t in tensors)
    return Bucket("shared_memory", None, 0, places)


def changed(tensor: RefitTensor, **fields: Any) -> RefitTensor:
    values = {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype}
    return RefitTensor(**{**values, **fields})


class Theirs:
    """A policy's own description of a tensor, of another type than ours."""

    name = NORM.name
    shape = torch.Size([4])
    dtype = torch.float32


def test_an_announcement_is_made_of_any_description() -> None:
    assert spec_of([Theirs()]) == RefitSpec((NORM,))
    assert spec_of_tensors([(NORM.name, torch.zeros(4))]) == RefitSpec((NORM,))


def test_a_name_is_announced_once() -> None:
    with pytest.raises(RefitError, match=r"model\.norm\.weight is announced twice"):
        spec_of([NORM, NORM])


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        ((EMBED,), r"vllm-0: the announcement lacks model\.norm\.weight; expected all 2 tensors"),
        ((EMBED, NORM, HEAD), r"vllm-0: the announcement has lm_head\.weight, which the model has not"),
        ((EMBED, changed(NORM, shape=(5,))), r"model\.norm\.weight: shape \(5,\); expected \(4,\)"),
        ((EMBED, changed(NORM, dtype=torch.bfloat16)), r"norm\.weight: dtype bfloat16; expected float32"),
        ((EMBED, EMBED, NORM), r"model\.embed_tokens\.weight is announced twice"),
        ((), r"lacks model\.embed_tokens\.weight, model\.norm\.weight"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(announced: tuple[RefitTensor, ...], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        require_fit(RefitSpec(announced), SPEC.tensors, component="vllm-0")


def test_many_missing_names_are_counted() -> None:
    expected = [changed(NORM, name=f"w{n}") for n in range(10)]
    with pytest.raises(RefitError, match=r"lacks w0, w1, w2 and 7 more"):
        require_fit(RefitSpec(()), expected, component="vllm-0")


def test_a_tied_head_may_come_or_not_but_never_in_another_shape() -> None:
    untied = (*SPEC.tensors, HEAD)
    for announced in (SPEC, RefitSpec(untied)):
        for expected in (SPEC.tensors, untied):
            require_fit(announced, expected, component="e", optional=TIED_HEAD)
    wrong = RefitSpec((*SPEC.tensors, changed(HEAD, shape=(9, 4))))
    with pytest.raises(RefitError, match=r"lm_head\.weight: shape \(9, 4\)"):
        require_fit(wrong, untied, component="e", optional=TIED_HEAD)


def test_an_untied_head_must_come() -> None:
    with pytest.raises(RefitError, match=r"lacks lm_head\.weight"):
        require_fit(SPEC, (*SPEC.tensors, HEAD), component="e")


def test_only_floating_dtypes_are_cast_and_only_if_asked() -> None:
    require_fit(RefitSpec((changed(NORM, dtype=torch.bfloat16),)), (NORM,), component="e", cast=True)
    with pytest.raises(RefitError, match=r"dtype int8; expected float32"):
        require_fit(RefitSpec((changed(NORM, dtype=torch.int8),)), (NORM,), component="e", cast=True)


def test_a_whole_refit_is_acknowledged() -> None:
    progress = RefitProgress("vllm-0", version=3)
    progress.begin(SPEC, 4)
    assert (progress.version, progress.target) == (3, 4)
    progress.took(bucket_of(NORM))
    with progress.taking(bucket_of(EMBED)):
        pass
    ack = progress.complete()
    assert (ack.replica, ack.version, ack.digest) == ("vllm-0", 4, manifest_digest(SPEC))
    assert (progress.version, progress.target, progress.stale) == (4, None, False)


def test_an_engine_that_was_never_refitted_takes_any_version() -> None:
    progress = RefitProgress("e")
    progress.begin(SPEC, 0)
    assert progress.target == 0


@pytest.mark.parametrize("version", [2, 3])
def test_a_version_that_does_not_grow_is_refused(version: int) -> None:
    progress = RefitProgress("e", version=3)
    with pytest.raises(RefitError, match=rf"version {version} was announced to an engine that holds 3"):
        progress.begin(SPEC, version)
    assert progress.target is None
    assert not progress.abort()


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (bucket_of(HEAD), r"lm_head\.weight: not announced; expected one of model\.norm\.weight"),
        (bucket_of(EMBED), r"embed_tokens\.weight: came twice"),
        (bucket_of(NORM, NORM), r"norm\.weight: came twice"),
        (bucket_of(changed(NORM, shape=(2, 2))), r"norm\.weight: shape \(2, 2\); expected \(4,\)"),
        (bucket_of(changed(NORM, dtype=torch.float64)), r"dtype float64; expected float32"),
        (bucket_of(NORM, HEAD), r"lm_head\.weight: not announced"),
    ],
)
def test_a_bucket_that_breaks_the_announcement_is_refused_before_it_is_loaded(
    bucket: Bucket, message: str
) -> None:
    progress = RefitProgress("e", version=1)
    progress.begin(SPEC, 2)
    progress.took(bucket_of(EMBED))
    loaded = False
    with pytest.raises(RefitError, match=message), progress.taking(bucket):
        loaded = True
    assert not loaded
    progress.took(bucket_of(NORM))
    assert progress.complete().version == 2


def test_an_end_before_everything_came_leaves_the_engine_stale() -> None:
    progress = RefitProgress("e", version=1)
    progress.begin(SPEC, 2)
    progress.took(bucket_of(EMBED))
    with pytest.raises(RefitError, match=r"model\.norm\.weight never came; expected all 2"):
        progress.complete()
    assert (progress.version, progress.target, progress.stale) == (1, None, True)


def test_a_bucket_that_failed_to_load_counts_as_missing_and_may_come_again() -> None:
    progress = RefitProgress("e", version=1)
    progress.begin(RefitSpec((NORM,)), 2)
    with pytest.raises(OSError, match="torn"), progress.taking(bucket_of(NORM)):
        raise OSError("torn")
    progress.took(bucket_of(NORM))
    assert progress.complete().version == 2


def test_an_aborted_refit_leaves_an_engine_stale_only_if_a_weight_moved() -> None:
    progress = RefitProgress("e", version=1)
    progress.begin(SPEC, 2)
    assert not progress.abort()
    progress.begin(SPEC, 2)
    with pytest.raises(RefitError):
        progress.took(bucket_of(HEAD))
    assert not progress.abort()
    progress.begin(SPEC, 2)
    with pytest.raises(OSError, match="torn"), progress.taking(bucket_of(NORM)):
        raise OSError("torn")
    assert progress.abort()
    assert progress.abort()
    assert progress.version == 1


def test_a_stale_engine_takes_the_same_version_again_and_is_whole_after_it() -> None:
    progress = RefitProgress("e", version=1)
    progress.begin(SPEC, 2)
    progress.took(bucket_of(EMBED))
    progress.abort()
    progress.begin(SPEC, 1)
    progress.abort()
    assert progress.stale
    progress.begin(SPEC, 1)
    progress.took(bucket_of(EMBED, NORM))
    progress.complete()
    assert (progress.version, progress.stale) == (1, False)


def test_calls_outside_a_refit_are_refused() -> None:
    progress = RefitProgress("e")
    with pytest.raises(RefitError, match=r"e: a bucket came outside a refit; expected begin_refit"):
        progress.took(bucket_of(NORM))
    with pytest.raises(RefitError, match=r"finish_refit was called outside a refit"):
        progress.complete()
    progress.begin(SPEC, 1)
    with pytest.raises(RefitError, match=r"version 2 was announced while version 1 arrives"):
        progress.begin(SPEC, 2)


def test_a_refit_without_tensors_is_refused() -> None:
    with pytest.raises(RefitError, match=r"announced without a tensor"):
        RefitProgress("e").begin(RefitSpec(()), 1)
