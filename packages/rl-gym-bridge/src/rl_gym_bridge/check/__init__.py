"""``rl-gym-bridge check``: whether an environment of NeMo Gym keeps the contract that trainers rely on."""
