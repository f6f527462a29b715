"""Right after a refit vLLM samples from exactly the distribution that the policy scores."""

from __future__ import annotations

import pytest
import torch

from rl_algorithms.batching import build_sft_batch
from rl_algorithms.losses import SFTLoss
from rl_app_core.config.sections import TinyModel
from rl_app_core.demonstrations import tokenizer_texts
from rl_app_core.tiny_model import write_tiny_model
from rl_generation.protocol import GenerationRequest, SamplingParams
from rl_generation.refit.manifest import spec_of
from rl_generation.vllm import VllmEngine, VllmSettings
from rl_policy_megatron import MegatronPolicy, OptimizerSettings, PolicySettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

UPDATES = 3
PROMPTS, NEW_TOKENS, LEAST_TOKENS = 96, 32, 2000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, TinyModel(), tokenizer_texts(), seed=0)
    return directory


@pytest.fixture(scope="module")
def engine(model_dir):
    # Before the policy is made: a process that has computed with several threads does not fork well.
    torch.set_num_threads(1)
    engine = VllmEngine(VllmSettings(str(model_dir), dtype="float32", kv_cache_bytes=64 << 20))
    engine.start()
    yield engine
    engine.shutdown(30.0)


def prompts(seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (PROMPTS,), generator=generator).tolist()
    return [tuple(torch.randint(10, 300, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.parametrize(("temperature", "version"), [(1.0, 1), (0.6, 2)])
def test_d5_after_a_refit_the_importance_ratio_is_one(engine, model_dir, temperature, version):
    settings = PolicySettings(temperature=temperature, micro_batch_size=32)
    with MegatronPolicy(model_dir, settings, OptimizerSettings()) as policy:
        demonstrations = build_sft_batch([(p, [0] + [1] * (len(p) - 1)) for p in prompts(version)], 0)
        for _ in range(UPDATES):
            policy.train(demonstrations, SFTLoss(), learning_rate=1e-2)
        engine.prepare_refit(spec_of(policy.refit_spec()))
        engine.update_weights(policy.stream_weights(), version)

        sampling = SamplingParams(NEW_TOKENS, temperature=temperature, seed=version)
        asked = [GenerationRequest(prompt, sampling) for prompt in prompts(7)]
        answers = engine.generate(asked)
        assert {answer.weight_version for answer in answers} == {version}
        rows = [
            ([*request.prompt_token_ids, *answer.token_ids], [0] * len(request.prompt_token_ids))
            for request, answer in zip(asked, answers, strict=True)
        ]
        batch = build_sft_batch([(ids, mask + [1] * (len(ids) - len(mask))) for ids, mask in rows], 0)
        scores = policy.logprobs(batch)

    ours = torch.cat([scores[i, len(mask) : len(ids)] for i, (ids, mask) in enumerate(rows)]).double()
    theirs = torch.tensor([value for answer in answers for value in answer.logprobs], dtype=torch.float64)
    assert len(ours) == len(theirs) >= LEAST_TOKENS
    gap = (ours - theirs).abs()
    print(f"\ntemperature {temperature}: {len(gap)} tokens, gap mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.mean() <= 1e-4
    assert gap.max() <= 2e-3
    assert (gap.exp() - 1).max() <= 2.1e-3
    # Not because everything is certain: the tokens were drawn from a spread distribution.
    assert theirs.exp().mean() < 0.9


def test_the_old_weights_would_have_been_noticed(engine, model_dir):
    """What the bounds of the test above are worth: a policy without the updates misses them by far."""
    with MegatronPolicy(model_dir, PolicySettings(), OptimizerSettings()) as policy:
        answers = engine.generate(
            [GenerationRequest((5, 9, 4), SamplingParams(32, seed=s)) for s in range(8)]
        )
        batch = build_sft_batch(
            [([5, 9, 4, *a.token_ids], [0] * 3 + [1] * len(a.token_ids)) for a in answers], 0
        )
        scores = policy.logprobs(batch)
    gap = torch.cat(
        [
            (scores[i, 3 : 3 + len(a.token_ids)] - torch.tensor(a.logprobs)).abs()
            for i, a in enumerate(answers)
        ]
    )
    assert gap.mean() > 1e-2
