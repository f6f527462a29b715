"""Every method by name: its term, its denominator, where it comes from, and how a run asks for it.

``python -m rl_algorithms.registry`` prints the table of ``docs/algorithms.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Application = Literal["grpo", "distill", "library"]


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """One line of the table.

    Attributes:
        name: as the field calls it.
        application: the command that runs it; ``library`` methods are called from code.
        term: what is minimised at each trained token.
        normaliser: what the sum of the terms is divided by, over the whole batch.
        advantage: what a rollout or a token is worth.
        source: paper or report.
        settings: configuration keys that ask for it, with their values; those of the CPU recipe aside.
        test: file below ``packages/rl-algorithms/tests`` and function that hold its numbers.
    """

    name: str
    application: Application
    term: str
    normaliser: str
    advantage: str
    source: str
    settings: Mapping[str, object]
    test: str


_RATIO = "max(−A·ρ, −A·clip(ρ))"
_TOKENS = "trained tokens"
_GROUP = "(r − mean) / (std + ε) in the group"

METHODS: tuple[MethodEntry, ...] = (
    MethodEntry(
        "GRPO",
        "grpo",
        _RATIO,
        "sequences, each by its tokens",
        _GROUP,
        "arXiv:2402.03300",
        {"algorithm.normalization": "sequence", "algorithm.clip_high": 0.2},
        "test_advantages.py::test_c8_reference_values",
    ),
    MethodEntry(
        "DAPO",
        "grpo",
        _RATIO,
        _TOKENS,
        _GROUP,
        "arXiv:2503.14476",
        {
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.dynamic_sampling": True,
            "rewards.overlong_buffer": 4,
        },
        "test_collect.py::test_flat_groups_are_replaced_until_the_step_is_full",
    ),
    MethodEntry(
        "leave-one-out baseline",
        "grpo",
        _RATIO,
        _TOKENS,
        "(r − mean of the others) / std of the others",
        "arXiv:2402.14740",
        {"algorithm.leave_one_out": True},
        "test_advantages.py::test_c1_leave_one_out_does_not_divide_by_epsilon",
    ),
    MethodEntry(
        "RLOO",
        "grpo",
        _RATIO,
        _TOKENS,
        "r − mean of the others",
        "arXiv:2402.14740",
        {"algorithm.advantage": "rloo"},
        "test_advantages.py::test_c8_reference_values",
    ),
    MethodEntry(
        "Dr. GRPO",
        "grpo",
        _RATIO,
        "sequences × max_new_tokens",
        "r − mean in the group",
        "arXiv:2503.20783",
        {"algorithm.advantage": "dr_grpo", "algorithm.normalization": "constant"},
        "test_clipped_pg.py::test_normalizations",
    ),
    MethodEntry(
        "REINFORCE++",
        "grpo",
        _RATIO,
        _TOKENS,
        "r, less the group's mean if asked, whitened over all trained tokens",
        "arXiv:2501.03262",
        {"algorithm.advantage": "reinforce_plus_plus", "algorithm.group_baseline": False},
        "test_advantage_estimators.py::test_reinforce_plus_plus_whitens_over_tokens",
    ),
    MethodEntry(
        "GDPO",
        "grpo",
        _RATIO,
        _TOKENS,
        "each component normalised in its group, summed, whitened",
        "arXiv:2601.05242",
        {"algorithm.advantage": "gdpo"},
        "test_advantage_estimators.py::test_gdpo_tells_combinations_apart_that_a_sum_does_not",
    ),
    MethodEntry(
        "GSPO",
        "grpo",
        "as GRPO, ρ = exp(mean log-ratio of the sequence)",
        "sequences, each by its tokens",
        _GROUP,
        "arXiv:2507.18071",
        {"algorithm.objective": "gspo", "algorithm.normalization": "sequence"},
        "test_policy_gradient_variants.py::test_d10_gspo_has_the_geometric_mean_of_the_sequence",
    ),
    MethodEntry(
        "CISPO",
        "grpo",
        "−A·stopgrad(clip(ρ))·lp",
        _TOKENS,
        _GROUP,
        "arXiv:2506.13585",
        {"algorithm.objective": "cispo"},
        "test_policy_gradient_variants.py::test_cispo_keeps_the_gradient_of_clipped_tokens",
    ),
    MethodEntry(
        "REINFORCE",
        "grpo",
        "−A·lp",
        _TOKENS,
        _GROUP,
        "Williams 1992",
        {"algorithm.objective": "reinforce"},
        "test_clipped_pg.py::test_reinforce_and_forced_on_policy",
    ),
    MethodEntry(
        "forced on-policy",
        "grpo",
        "−A·exp(lp − stopgrad(lp))",
        _TOKENS,
        _GROUP,
        "ratio 1 with its gradient",
        {"algorithm.objective": "on_policy"},
        "test_clipped_pg.py::test_reinforce_and_forced_on_policy",
    ),
    MethodEntry(
        "dual clip",
        "grpo",
        "for A < 0 also min(…, −A·c)",
        _TOKENS,
        _GROUP,
        "arXiv:1912.09729",
        {"algorithm.dual_clip": 3.0},
        "test_clipped_pg.py::test_dual_clip_bounds_only_negative_advantages",
    ),
    MethodEntry(
        "PPO with a critic",
        "library",
        _RATIO,
        _TOKENS,
        "generalised advantage estimation of a value head's outputs",
        "arXiv:1506.02438, arXiv:1707.06347",
        {},
        "test_advantage_estimators.py::test_gae_by_hand",
    ),
    MethodEntry(
        "on-policy distillation, top k",
        "distill",
        "Σ p_S (log p_S − log p_T) over the teacher's top k and a tail bin; or forward, or mixed",
        _TOKENS,
        "none",
        "arXiv:2306.13649",
        {"algorithm.objective": "topk", "algorithm.divergence": "reverse"},
        "test_distillation.py::test_with_a_tail_it_is_a_divergence_of_bins",
    ),
    MethodEntry(
        "on-policy distillation as reinforcement",
        "distill",
        _RATIO,
        _TOKENS,
        "log p_T − log p_S of each token",
        "arXiv:2306.13649",
        {"algorithm.objective": "opd"},
        "test_advantage_estimators.py::test_opd_is_teacher_minus_student_on_sampled_tokens",
    ),
    MethodEntry(
        "truncated importance sampling",
        "grpo",
        "w·(…), w = clamp(exp(prev − engine))",
        _TOKENS,
        _GROUP,
        "fengyao.notion.site/off-policy-rl",
        {"algorithm.importance_correction": "tis", "algorithm.importance_max": 2.0},
        "test_clipped_pg.py::test_importance_correction",
    ),
    MethodEntry(
        "IcePop",
        "grpo",
        "w·(…), w = exp(prev − engine) inside the bounds, else 0",
        _TOKENS,
        _GROUP,
        "ringtech.notion.site/icepop",
        {
            "algorithm.importance_correction": "icepop",
            "algorithm.importance_min": 0.5,
            "algorithm.importance_max": 2.0,
        },
        "test_clipped_pg.py::test_importance_correction",
    ),
    MethodEntry(
        "masked sequences",
        "grpo",
        "w·(…), w = exp(prev − engine), 0 on sequences whose geometric mean of w is outside the bounds",
        _TOKENS,
        _GROUP,
        "richardli.xyz/rl-collapse",
        {
            "algorithm.importance_correction": "seq-mask-tis",
            "algorithm.importance_min": 0.5,
            "algorithm.importance_max": 2.0,
        },
        "test_policy_gradient_variants.py::test_seq_mask_tis_drops_sequences_and_keeps_tokens_of_the_rest",
    ),
    MethodEntry(
        "KL in the loss",
        "grpo",
        "… + β·k(ref − lp), k one of k1, k2, k3",
        _TOKENS,
        _GROUP,
        "joschu.net/blog/kl-approx.html",
        {"algorithm.kl_coefficient": 0.1, "algorithm.kl_form": "k3"},
        "test_clipped_pg.py::test_d7_the_kl_term_carries_gradient_only_when_it_counts",
    ),
    MethodEntry(
        "KL in the reward",
        "grpo",
        _RATIO,
        _TOKENS,
        "of r − β·Σ k",
        "arXiv:2203.02155",
        {"algorithm.kl_coefficient": 0.1, "algorithm.kl_in": "reward", "algorithm.kl_form": "k1"},
        "test_advantage_estimators.py::test_a_kl_in_the_reward_is_summed_over_the_rollout",
    ),
    MethodEntry(
        "entropy bonus",
        "grpo",
        "… − β·H",
        _TOKENS,
        _GROUP,
        "arXiv:1602.01783",
        {"algorithm.entropy_coefficient": 0.01},
        "test_clipped_pg.py::test_d3_kl_and_entropy_terms_do_not_depend_on_micro_batches",
    ),
    MethodEntry(
        "likelihood of positive examples",
        "grpo",
        "… − μ·lp where A > 0",
        "trained tokens with A > 0",
        _GROUP,
        "arXiv:2504.05118",
        {"algorithm.positive_nll_coefficient": 0.1},
        "test_policy_gradient_variants.py::test_positive_examples_are_divided_by_their_own_tokens",
    ),
    MethodEntry(
        "SFT",
        "library",
        "−lp",
        _TOKENS,
        "none",
        "maximum likelihood",
        {},
        "test_sft_loss.py::test_token_normalised_over_the_whole_batch",
    ),
    MethodEntry(
        "DPO",
        "library",
        "−log σ(β·(margin of the chosen − margin of the rejected))",
        "pairs",
        "none",
        "arXiv:2305.18290",
        {},
        "test_policy_gradient_variants.py::test_dpo_is_exact_however_pairs_are_cut",
    ),
)


def table(methods: tuple[MethodEntry, ...] = METHODS) -> str:
    """The methods as a Markdown table."""
    lines = [
        "| method | command | term at each token | divided by | advantage A | source | settings | test |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in methods:
        settings = "<br>".join(f"`{key}={_shown(value)}`" for key, value in entry.settings.items()) or "–"
        command = f"`{entry.application}`" if entry.application != "library" else "library"
        lines.append(
            f"| {entry.name} | {command} | {entry.term} | {entry.normaliser} | {entry.advantage} | "
            f"{entry.source} | {settings} | `{entry.test}` |"
        )
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.stdout.write(table())
