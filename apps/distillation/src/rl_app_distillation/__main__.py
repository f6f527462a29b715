"""``python -m rl_app_distillation`` is the ``distill`` command."""

from .cli import main

if __name__ == "__main__":
    main()
