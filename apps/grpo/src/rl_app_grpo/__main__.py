"""``python -m rl_app_grpo`` is the ``grpo`` command."""

from .cli import main

if __name__ == "__main__":
    main()
