from __future__ import annotations

import pytest
import yaml

from rl_app_core.config import ConfigError, GRPOConfig, load_config, to_yaml
from rl_app_core.config.errors import closest_path
from rl_app_core.config.loading import known_paths
from rl_app_core.config.reference import reference
from rl_app_core.config.synonyms import SYNONYMS

SMALLEST = ["model.tiny={}", "data.train.dataset_name=basic_arithmetic"]


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*SMALLEST, *words], model=GRPOConfig)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_overrides_are_read_as_yaml_and_win_over_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 3\nmodel: {tiny: {layers: 4}}\ndata: {train: {dataset_name: x}}\n")
    config = load_config(
        recipe, ["seed=7", "algorithm.learning_rate=1e-3", "model.tiny.heads=4"], model=GRPOConfig
    )
    assert (config.seed, config.model.tiny.layers, config.model.tiny.heads) == (7, 4, 4)
    assert config.algorithm.learning_rate == 1e-3


def test_the_resolved_configuration_reads_back_as_itself(tmp_path):
    config = load_config(
        None,
        [*SMALLEST, "warm_start.steps=2", "warm_start.phases=[{until_step: 2, share: 0.5}]"],
        model=GRPOConfig,
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path, model=GRPOConfig) == config
    assert yaml.safe_load(path.read_text())["algorithm"]["clip_high"] == 0.28


def test_l2_a_key_in_the_wrong_section_names_the_right_one():
    assert refused("data.dataset_name=x") == (
        "data.dataset_name is not a setting; did you mean data.train.dataset_name?"
    )


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("algorithm.lerning_rate", "algorithm.learning_rate"),
        ("algoritm.steps", "algorithm.steps"),
        ("group_size", "algorithm.group_size"),
        ("model.tiny.hiden_size", "model.tiny.hidden_size"),
        ("generation.tempurature", "generation.temperature"),
        ("generation.backend", "generation.engine"),
        ("generation.replicas", "generation.vllm.replicas"),
        ("generation.vllm.max_model_length", "generation.vllm.max_model_len"),
        ("policy.tensor", "policy.parallel.tensor"),
        ("policy.parallel.tensr", "policy.parallel.tensor"),
        ("policy.batch_tokens", "policy.micro_batch_tokens"),
        ("policy.micro_batch", "policy.micro_batch_size"),
        ("policy.rank", "policy.peft.rank"),
        ("policy.learning_rate", "algorithm.learning_rate"),
        ("warm_start.decay", "algorithm.decay"),
    ],
)
def test_a_misspelt_key_names_the_one_that_was_meant(unknown, meant):
    assert f"did you mean {meant}?" in refused(f"{unknown}=1")


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("policy.lora", "policy.peft"),
        ("policy.lora_rank", "policy.peft.rank"),
        ("policy.peft.r", "policy.peft.rank"),
        ("policy.tp", "policy.parallel.tensor"),
        ("policy.dtype", "policy.precision"),
        ("policy.gradient_checkpointing", "policy.recompute"),
        ("policy.sequence_packing", "policy.packing"),
        ("policy.megatron_cfg.pipeline_model_parallel_size", "policy.parallel.pipeline"),
        ("policy.train_mb_tokens", "policy.micro_batch_tokens"),
        ("policy.model_name", "model.path"),
        ("generation.tensor_parallel", "generation.vllm.tensor_parallel_size"),
        ("generation.max_tokens", "generation.max_new_tokens"),
        ("algorithm.lr", "algorithm.learning_rate"),
        ("algorithm.beta", "algorithm.kl_coefficient"),
        ("grpo.num_generations_per_prompt", "algorithm.group_size"),
        ("loss_fn.ratio_clip_max", "algorithm.clip_high"),
        ("actor_rollout_ref.rollout.n", "algorithm.group_size"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "generation.vllm.tensor_parallel_size"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "policy.parallel.tensor"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "policy.micro_batch_tokens"),
        ("data.max_response_length", "generation.max_new_tokens"),
        ("trainer.save_freq", "checkpointing.every"),
        ("num_generations", "algorithm.group_size"),
        ("per-device-train-batch-size", "policy.micro_batch_size"),
    ],
)
def test_a_name_of_another_stack_names_ours(unknown, meant):
    assert refused(f"{unknown}=1").startswith(f"{unknown} is not a setting; did you mean {meant}?")


def test_names_of_other_stacks_mean_settings_that_exist_and_are_none_themselves():
    known = set(known_paths())
    assert known >= SYNONYMS.keys()
    names = [name for several in SYNONYMS.values() for name in several]
    assert len(names) == len(set(names))
    assert not known & set(names)


def test_of_a_section_that_is_not_known_every_key_is_told():
    assert refused("policy.sequence_packing.enabled=true") == (
        "policy.sequence_packing is not a setting; did you mean policy.packing?"
    )
    message = refused("rollout.n=4", "rollout.name=vllm", "trainer={}", "grpo={a: 1, b: 2, c: 3, d: 4, e: 5}")
    assert "rollout.n is not a setting; did you mean algorithm.group_size?" in message
    assert "rollout.name is not a setting; did you mean generation.engine?" in message
    assert "trainer is not a setting;" in message
    assert "grpo.d is not" in message
    assert "grpo.e is not" not in message


def test_an_unrecognisable_key_says_where_the_keys_are_listed():
    assert "show-config" in refused("zzzz=1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["algorithm.group_size=0"], ["algorithm.group_size=0", "greater than 0"]),
        (["algorithm.learning_rate=-1"], ["algorithm.learning_rate=-1", "greater than or equal to 0"]),
        (["algorithm.learning_rate=nan"], ["algorithm.learning_rate", "finite"]),
        (["algorithm.steps=many"], ["algorithm.steps='many'", "integer"]),
        (["generation.top_p=0.9"], ["top_p=0.9", "cannot score", "top_p=1"]),
        (["generation.top_k=5"], ["top_k=5", "cannot score"]),
        (["generation.temperature=0"], ["generation.temperature=0"]),
        (["generation.engine=sglang"], ["generation.engine='sglang'", "'megatron', 'vllm' or 'trtllm'"]),
        (["generation.vllm.replicas=0"], ["generation.vllm.replicas=0", "greater than 0"]),
        (["generation.vllm.engine_arguments=3"], ["generation.vllm.engine_arguments=3", "dictionary"]),
        (["generation.server.enabled=true"], ["the engine megatron", "serves no HTTP", "engine=vllm"]),
        (
            ["generation.engine=vllm", "generation.server.ports=[9000, 8000]"],
            ["generation.server: ports must rise"],
        ),
        (
            ["generation.engine=trtllm", "generation.server.tool_parser=hermes"],
            ["server.tool_parser", "engine=trtllm"],
        ),
        (
            ["generation.engine=vllm", "generation.vllm.max_model_len=32"],
            ["max_new_tokens=32 leaves no room for a prompt in vllm.max_model_len=32"],
        ),
        (
            ["generation.engine=vllm", "generation.vllm.dtype=bfloat16"],
            ["generation.vllm.dtype=bfloat16", "policy.precision=float32", "algorithm.importance_correction"],
        ),
        (
            ["generation.engine=trtllm", "generation.trtllm.dtype=float16", "policy.precision=bfloat16"],
            ["generation.trtllm.dtype=float16", "policy.precision=bfloat16"],
        ),
        (
            ["policy.parallel.data=2"],
            ["policy.parallel asks for 2 processes", "generation.engine=megatron", "generation.engine=vllm"],
        ),
        (
            ["generation.engine=vllm", "policy.parallel={data: 3, expert: 2}"],
            ["policy.parallel: expert=2 does not divide data=3", "set data to a multiple of 2"],
        ),
        (["policy.parallel.sequence_parallel=true"], ["policy.parallel: sequence_parallel needs tensor=2"]),
        (["policy.parallel.tensor=0"], ["policy.parallel.tensor=0", "greater than 0"]),
        (["policy.peft.targets=[]"], ["policy.peft.targets", "at least 1 item"]),
        (["policy.peft.targets=[q_proj, q_proj]"], ["policy.peft: targets must name each projection once"]),
        (["policy.peft.targets=[qkv]"], ["policy.peft.targets.0='qkv'", "'q_proj'"]),
        (["policy.micro_batch_tokens=0"], ["policy.micro_batch_tokens=0", "greater than 0"]),
        (
            ["policy.micro_batch_tokens=512", "policy.micro_batch_size=8"],
            [
                "policy: micro_batch_size=8 has no effect beside micro_batch_tokens=512",
                "leave one of them out",
            ],
        ),
        (
            ["generation.engine=vllm", "generation.vllm={device: cuda, cpu_threads: 4}"],
            ["generation: vllm.cpu_threads=4 has no effect with vllm.device=cuda"],
        ),
        (
            ["algorithm.final_share=0.1"],
            ["algorithm: final_share=0.1 has no effect with decay=constant", "linear or cosine"],
        ),
        (["policy.recompute=some"], ["policy.recompute='some'", "'none' or 'full'"]),
        (["model.path=/nowhere"], ["exactly one of model.path", "model.tiny"]),
        (["data.train.path=x.jsonl"], ["exactly one of data.train.dataset_name"]),
        (["warm_start.steps=5"], ["last phase must reach step 5"]),
        (["seed=yes"], ["seed: true is a flag"]),
        (["algorithm.group_size=true"], ["algorithm.group_size: true is a flag"]),
        (["seed=99999999999999999999999"], ["seed=", "less than"]),
        (["steps"], ["'steps' is not an override", "key=value"]),
        (["cpu-vllm"], ["'cpu-vllm' is not an override", "recipe is chosen with -c"]),
        (["seed.deeper=1", "seed.deeper.still=1"], ["seed.deeper is a value, not a section"]),
    ],
)
def test_a_value_that_cannot_be_meant_names_key_and_remedy(words, told):
    message = refused(*words)
    for part in told:
        assert part in message


@pytest.mark.parametrize(
    "words",
    [
        ["generation.engine=vllm", "generation.vllm.dtype=float32"],
        ["generation.engine=vllm", "generation.vllm.dtype=bfloat16", "policy.precision=bfloat16"],
        ["generation.vllm.dtype=bfloat16", "generation.vllm.max_model_len=32"],
        ["policy.micro_batch_tokens=512", "policy.micro_batch_size=64"],
        ["generation.engine=vllm", "policy.parallel.tensor=2", "policy.peft={}"],
        ["algorithm.final_share=0.1", "algorithm.decay=cosine"],
        ["generation.vllm={device: cuda, cpu_threads: 4}"],
        [
            *("generation.engine=vllm", "generation.vllm.dtype=bfloat16"),
            *("algorithm.importance_correction=tis", "algorithm.importance_max=2"),
        ],
    ],
)
def test_settings_that_go_together_are_accepted(words):
    """Nobody minds the settings of an engine that the run does not use: one key changes engines."""
    load_config(None, [*SMALLEST, *words], model=GRPOConfig)


def test_a_missing_or_broken_recipe_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml", model=GRPOConfig)
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        load_config(broken, model=GRPOConfig)
    assert "\n" not in str(caught.value)
    broken.write_text("seed: 1\nalgorithm: {steps: 3}\nalgorithm: {group_size: 5}\n")
    with pytest.raises(ConfigError, match="'algorithm' is given twice"):
        load_config(broken, model=GRPOConfig)
    broken.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        load_config(broken, model=GRPOConfig)


def test_sections_are_frozen():
    config = load_config(None, SMALLEST, model=GRPOConfig)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1


def test_a_sibling_of_the_same_name_is_preferred_to_a_distant_one():
    known = ["a.size", "b.c.size", "b.sizes"]
    assert closest_path("b.size", known) == "b.c.size"


def test_the_reference_has_every_key_with_its_default():
    table = reference()
    for path in known_paths():
        if not any(other.startswith(f"{path}.") for other in known_paths()):
            assert f"| `{path}` |" in table, path
    assert "| `algorithm.group_size` | `8` | Rollouts of each prompt" in table
