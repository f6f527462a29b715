"""What other stacks call the settings of this one: names of TRL, verl, NeMo RL and megatron, by ours.

A name may carry the names of sections before it where it alone would say too little; the longest that
fits wins. Names are looked up only where they are no settings of the section that they were given for.
"""

from __future__ import annotations

SYNONYMS: dict[str, tuple[str, ...]] = {
    "algorithm.adam_betas": ("adam_beta1", "adam_beta2", "betas", "optim.betas"),
    "algorithm.advantage": ("adv_estimator", "estimator"),
    "algorithm.clip_high": ("clip_ratio_high", "epsilon_high", "ratio_clip_max"),
    "algorithm.clip_low": ("clip_ratio", "clip_ratio_low", "clip_range", "epsilon", "ratio_clip_min"),
    "algorithm.decay": (
        "lr_decay_style",
        "lr_scheduler",
        "lr_scheduler_type",
        "lr_warmup_style",
        "scheduler",
    ),
    "algorithm.dual_clip": ("clip_ratio_c", "delta", "ratio_clip_c"),
    "algorithm.entropy_coefficient": ("entropy_coef", "entropy_coeff"),
    "algorithm.final_share": ("min_lr", "min_lr_ratio"),
    "algorithm.gradient_clip": ("clip_grad", "grad_clip", "max_grad_norm"),
    "algorithm.group_size": (
        *("generations_per_prompt", "num_generations", "num_generations_per_prompt"),
        *("n_samples_per_prompt", "num_samples", "rollout.n", "rollouts_per_prompt"),
    ),
    "algorithm.importance_correction": (
        *("tis", "use_importance_sampling_correction", "vllm_importance_sampling_correction"),
        "rollout_is",
    ),
    "algorithm.importance_max": (
        *("tis_imp_ratio_cap", "truncated_importance_sampling_ratio", "vllm_importance_sampling_cap"),
        "rollout_is_threshold",
    ),
    "algorithm.kl_coefficient": (
        *("beta", "init_kl_coef", "kl_beta", "kl_coef", "kl_loss_coef", "reference_policy_kl_penalty"),
        "use_kl_loss",
    ),
    "algorithm.kl_form": ("kl_loss_type", "kl_penalty", "reference_policy_kl_type"),
    "algorithm.learning_rate": ("learning_rate", "lr"),
    "algorithm.leave_one_out": ("use_leave_one_out_baseline",),
    "algorithm.normalization": ("loss_agg_mode", "loss_type", "token_level_loss"),
    "algorithm.normalize": ("norm_adv_by_std_in_grpo", "normalize_rewards", "scale_rewards"),
    "algorithm.overlong_filtering": ("mask_truncated_completions",),
    "algorithm.prompts_per_step": (
        *("data.batch_size", "data.train_batch_size", "num_prompts_per_step", "prompts_per_batch"),
        *("train_global_batch_size", "global_batch_size", "gen_batch_size"),
    ),
    "algorithm.steps": (
        *("epochs", "max_num_epochs", "max_num_steps", "max_steps", "num_epochs", "num_train_epochs"),
        *("total_epochs", "total_training_steps", "train_steps"),
    ),
    "algorithm.updates_per_step": ("num_iterations", "ppo_epochs", "ppo_mini_batch_size", "mini_batch_size"),
    "algorithm.warmup_steps": ("lr_warmup_steps", "lr_warmup_steps_ratio", "warmup_iters", "warmup_ratio"),
    "checkpointing.every": ("save_every", "save_freq", "save_interval", "save_period", "save_steps"),
    "checkpointing.keep": ("keep_top_k", "max_actor_ckpt_to_keep", "save_total_limit"),
    "cluster.address": ("ray_address",),
    "data.held_out.path": ("eval_dataset", "val_files", "validation_jsonl_fpath"),
    "data.held_out.size": ("max_val_samples", "val_batch_size"),
    "data.train.dataset_name": ("dataset",),
    "data.train.path": ("train_data", "train_files", "train_jsonl_fpath"),
    "environment.name": ("env", "env_name"),
    "evaluation.every": ("eval_every", "eval_freq", "eval_steps", "test_freq", "val_period"),
    "generation.engine": ("backend", "generation.name", "inference_engine", "rollout.name", "use_vllm"),
    "generation.max_new_tokens": (
        *("max_completion_length", "max_response_length", "max_tokens", "response_length"),
        "generation.max_length",
    ),
    "generation.temperature": ("sampling_temperature",),
    "generation.vllm.engine_arguments": (
        *("engine_kwargs", "gpu_memory_utilization", "vllm_gpu_memory_utilization", "vllm_kwargs"),
        "enforce_eager",
    ),
    "generation.vllm.max_model_len": (
        *("max_model_length", "max_prompt_length", "max_seq_length", "max_total_sequence_length"),
        "vllm_max_model_length",
    ),
    "generation.vllm.prefix_cache": ("enable_prefix_caching",),
    "generation.vllm.replicas": ("data_parallel_size", "num_engines", "vllm_num_engines"),
    "generation.vllm.tensor_parallel_size": (
        *("generation.tensor_parallel", "rollout.tensor_model_parallel_size", "vllm_tensor_parallel_size"),
        *("generation.tp", "vllm_cfg.tensor_parallel_size"),
    ),
    "logging.tensorboard": ("report_to", "tensorboard_enabled"),
    "model.path": (
        *("hf_path", "model.name", "model.name_or_path", "model_name_or_path", "model_path"),
        *("policy.model_name", "pretrained_model_name_or_path"),
    ),
    "policy.micro_batch_size": (
        *("logprob_batch_size", "micro_batch_size_per_gpu", "per_device_train_batch_size"),
        *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "train_micro_batch_size"),
        *("gradient_accumulation_steps", "policy.batch_size", "policy.mbs"),
    ),
    "policy.micro_batch_tokens": (
        *("dynamic_batching", "max_token_len_per_gpu", "max_tokens_per_gpu", "policy.batch_tokens"),
        *("policy.max_tokens", "ppo_max_token_len_per_gpu", "train_mb_tokens", "use_dynamic_bsz"),
    ),
    "policy.packing": ("pack", "sequence_packing", "use_remove_padding"),
    "policy.parallel.data": ("dp", "dp_size", "gpus_per_node", "n_gpus_per_node", "nnodes", "num_gpus"),
    "policy.parallel.expert": ("ep", "ep_size", "expert_model_parallel_size", "policy.expert_parallel"),
    "policy.parallel.pipeline": (
        *("pipeline_model_parallel_size", "policy.pipeline_parallel", "pp", "pp_size"),
        "pipeline_parallel_size",
    ),
    "policy.parallel.sequence_parallel": ("policy.sp",),
    "policy.parallel.tensor": (
        *("policy.tensor_parallel", "policy.tensor_parallel_size", "tensor_model_parallel_size", "tp"),
        *("tp_size", "tensor_parallel"),
    ),
    "policy.peft": ("adapter", "adapters", "lora", "lora_cfg", "peft_config", "use_lora", "use_peft"),
    "policy.peft.alpha": ("lora_alpha",),
    "policy.peft.rank": ("lora_r", "lora_rank", "peft.dim", "peft.r"),
    "policy.peft.targets": ("lora_target_modules", "target_modules"),
    "policy.precision": ("bf16", "fp16", "policy.dtype", "mixed_precision", "torch_dtype"),
    "policy.recompute": (
        *("activation_checkpointing", "enable_gradient_checkpointing", "gradient_checkpointing"),
        "recompute_granularity",
    ),
    "rewards.overlong_buffer": ("overlong_buffer.len", "overlong_buffer_length", "soft_punish_cache"),
    "seed": ("random_seed",),
    "warm_start.steps": ("sft_steps",),
}

_BY_NAME = {name: path for path, names in SYNONYMS.items() for name in names}


def synonym(unknown: str) -> str | None:
    """The setting that the dotted ``unknown`` is called here, ``None`` if no other stack calls it so."""
    parts = unknown.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        found = _BY_NAME.get(".".join(parts[start:]))
        if found is not None:
            return found
    return None
