"""A program that starts Gym and then ends in one of many ways.

Arguments: the double's file or ``real``, a folder, how to end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from rl_gym_bridge.config import NemoGymConfig
from rl_gym_bridge.interpreter import GymInterpreter
from rl_gym_bridge.process import GymProcess
from rl_gym_bridge.supervision.deployment import Deployment

MCQA = (
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    "resources_servers/mcqa/configs/mcqa.yaml",
)
SHUT_DOWN = ("ignore SIGINT", "block signals", "ignore SIGCHLD")


def main() -> None:
    double, folder, mode = sys.argv[1:]
    behaviour: dict[str, object] = {"daemons": 2}
    if mode == "sleep while starting":
        behaviour["list_after_s"] = 60
    if mode == "ignore SIGINT":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mode == "block signals":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})
    if mode == "ignore SIGCHLD":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    interpreter = None
    settings: dict[str, object] = {"double": behaviour}
    if double == "real":
        settings = {"config_paths": MCQA}
    else:
        interpreter = GymInterpreter(Path(sys.executable), Path(double), "0.4.0", "3.12.0")
    config = NemoGymConfig(
        "model",
        base_urls=("http://127.0.0.1:9/v1",),
        gym_config=settings,
        work_dir=folder,
        # Long enough that its first part is told from a busy machine's promptness.
        shutdown_timeout_s=12.0 if mode in SHUT_DOWN else 3.0,
        start_timeout_s=240.0,
    )
    gym = GymProcess(config, interpreter=interpreter, search_folder=folder)
    if mode == "sleep while starting":
        wait = Deployment.await_head

        def announce(self: Deployment, *arguments: object) -> None:
            print("run", self.run_id, flush=True)
            wait(self, *arguments)  # pyright: ignore

        Deployment.await_head = announce  # type: ignore[method-assign]
        gym.start()
    if mode == "started in a thread that ended":
        starter = threading.Thread(target=gym.start)
        starter.start()
        starter.join()
    else:
        gym.start()
    print("run", gym.run_id, flush=True)
    if mode == "exception":
        with_block(gym)
    elif mode == "os._exit":
        os._exit(7)
    elif mode == "sys.exit":
        sys.exit(7)
    elif mode in SHUT_DOWN:
        began = time.monotonic()
        gym.shutdown()
        print("shutdown", time.monotonic() - began, flush=True)
        return
    elif mode == "fork" and os.fork() == 0:
        # A child that lives on with every descriptor of its parent.
        os.setsid()
        time.sleep(15)
        os._exit(0)
    time.sleep(600)


def with_block(gym: GymProcess) -> None:
    try:
        raise ValueError("the first error")
    except ValueError as error:
        gym.__exit__(type(error), error, error.__traceback__)
        raise


if __name__ == "__main__":
    main()
