"""``python -m rl_app_single_controller`` is the ``single-controller`` command."""

from .cli import main

if __name__ == "__main__":
    main()
