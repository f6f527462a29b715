"""Gym's settings for the acceptance cases: every environment, a policy and a judge, on one scripted model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .cases import AcceptanceCase

POLICY_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
"""Gym's own configuration of a model server that gives tokens back."""

_JUDGE = "judge_model"
_JUDGED = ("math_with_judge", "equivalence_llm_judge")


def acceptance_gym_config(cases: Iterable[AcceptanceCase], *, judge_model: str) -> dict[str, Any]:
    """Settings under which the cases hold.

    The judge is a model server of its own: the policy's would answer it with tokens that nobody trains on.

    Args:
        cases: whose environments are started.
        judge_model: name under which the judge is served, at the policy's address.
    """
    cases = tuple(cases)
    environments = {case.environment for case in cases}
    config: dict[str, Any] = {
        "config_paths": [POLICY_CONFIG, *dict.fromkeys(case.config_path for case in cases)],
        _JUDGE: {
            "responses_api_models": {
                "vllm_model": {
                    "entrypoint": "app.py",
                    "base_url": "${policy_base_url}",
                    "api_key": "${policy_api_key}",
                    "model": judge_model,
                    "return_token_id_information": False,
                    "uses_reasoning_parser": True,
                }
            }
        },
        "upload_rollouts_to_wandb": False,
    }
    for name in _JUDGED:
        if name in environments:
            config[name] = {
                "resources_servers": {
                    name: {
                        "judge_model_server": {"type": "responses_api_models", "name": _JUDGE},
                        # Nothing here is the policy's: a judge that got its settings would be seen.
                        "judge_responses_create_params": {
                            "input": [],
                            "temperature": 0.0,
                            "top_p": 1.0,
                            "max_output_tokens": 64,
                        },
                    }
                }
            }
    if "math_with_judge" in environments:
        config["math_with_judge"]["resources_servers"]["math_with_judge"]["should_use_judge"] = True
    if "equivalence_llm_judge" in environments:
        judged = config["equivalence_llm_judge"]["resources_servers"]["equivalence_llm_judge"]
        judged["check_twice_swap"] = True
    if "code_gen" in environments:
        config["code_gen"] = {"resources_servers": {"code_gen": {"num_processes": 2}}}
    return config
