"""A double of the processes that ``gym env start`` makes, for tests of their supervision.

It runs no environment. What it shares with Gym: it reads its settings from ``env.yaml`` in its working
folder, runs a head server that lists the servers, gives each server a wrapper process, starts daemons that
leave the session, waits for SIGINT, and ends when a server ends. Its settings under ``double`` make it
misbehave; see ``Behaviour``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

SERVERS = {
    "policy_model": "responses_api_models",
    "answers": "resources_servers",
    "answers_agent": "responses_api_agents",
}


class Behaviour:
    """What the settings under ``double`` ask for."""

    def __init__(self, wanted: dict) -> None:
        self.servers = {name: {"kind": kind} for name, kind in SERVERS.items()}
        for name, more in wanted.get("servers", {}).items():
            self.servers.setdefault(name, {"kind": "resources_servers"}).update(more)
        self.say = wanted.get("say", [])
        self.exit_at_start = wanted.get("exit_at_start")
        self.list_after_s = wanted.get("list_after_s", 0.0)
        self.ignore_sigint = wanted.get("ignore_sigint", False)
        self.stubborn = wanted.get("stubborn", False)
        self.daemons = wanted.get("daemons", 1)
        self.leave_servers = wanted.get("leave_servers", False)
        self.shell = wanted.get("shell", False)
        self.poll_s = wanted.get("poll_s", 0.05)
        self.host = wanted.get("host", "127.0.0.1")
        self.occupy = wanted.get("occupy")


class Server:
    """Answers GET at once and POST never. The library's server takes longer to import than all the rest."""

    def __init__(self, host: str, port: int) -> None:
        self.listening = socket.create_server((host, port), backlog=64)
        self.ready_at = 0.0
        self.status = 200
        self.instances: list = []
        self.drip = False

    def serve_forever(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                chunk = connection.recv(65536)
                if not chunk:
                    return
                request += chunk
            method, path, _ = request.split(b" ", 2)
            if method != b"GET":
                time.sleep(600)
            if path == b"/server_instances":
                body, status = json.dumps(self.instances).encode(), 200
            else:
                ready = time.monotonic() >= self.ready_at
                body, status = b'{"status": "ok"}', self.status if ready else 503
            connection.sendall(b"HTTP/1.0 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
            if self.drip:
                for byte in body[:-1]:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.3)
                body = body[-1:]
            connection.sendall(body)


def ignore_polite_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def serve(port: int, wanted: dict, stubborn: bool) -> None:
    """What a server's process does; never returns."""
    if stubborn:
        ignore_polite_signals()
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "exit_at_start" in wanted:
        print("RuntimeError: the weights of this server are not there", flush=True)
        os._exit(wanted["exit_at_start"])
    time.sleep(wanted.get("listen_after_s", 0.0))
    ready_at = time.monotonic() + wanted.get("ready_after_s", 0.0)
    for _ in range(wanted.get("children", 0)):
        if os.fork() == 0:
            os.setsid()
            if stubborn:
                ignore_polite_signals()
            time.sleep(600)
            os._exit(0)
    try:
        server = Server("127.0.0.1", port)
    except OSError as error:
        print(f"ERROR: [Errno {error.errno}] error while attempting to bind: {error.strerror}", flush=True)
        os._exit(1)
    server.ready_at, server.status = ready_at, wanted.get("status", 200)
    server.drip = wanted.get("drip", False)
    if "exit_after_s" in wanted:
        threading.Timer(wanted["exit_after_s"], os._exit, (3,)).start()
    server.serve_forever()


def wrapped_server(port: int, wanted: dict, behaviour: Behaviour) -> int:
    """Start a server behind another process, as a shell would be; returns the wrapper's process id."""
    if behaviour.shell:
        script = f"( {sys.executable} -I -S {__file__} serve {port} ) 2>&1 | tee -a server.log"
        return subprocess.Popen(["bash", "-c", script]).pid
    wrapper = os.fork()
    if wrapper:
        return wrapper
    signal.signal(signal.SIGINT, signal.SIG_IGN if behaviour.stubborn else signal.SIG_DFL)
    inner = os.fork()
    if inner == 0:
        serve(port, wanted, behaviour.stubborn)
    _, status = os.waitpid(inner, 0)
    os._exit(1 if os.waitstatus_to_exitcode(status) else 0)


def start_daemon() -> None:
    """A process that leaves its session and parent, listens, and overwrites nothing."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        ignore_polite_signals()
        with socket.create_server(("127.0.0.1", 0)):
            time.sleep(600)
        os._exit(0)
    os.waitpid(middle, 0)


def free_port(low: int, high: int, taken: set[int]) -> int:
    while True:
        port = random.randint(low, high)
        if port in taken:
            continue
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            taken.add(port)
            return port


def main() -> None:
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), {}, False)
    assert sys.argv[1:] == ["env", "start"], sys.argv
    with open("env.yaml", encoding="utf-8") as file:
        settings = json.load(file)
    with open("seen.json", "w", encoding="utf-8") as file:
        json.dump({"settings": settings, "environment": dict(os.environ), "arguments": sys.argv}, file)
    behaviour = Behaviour(settings.get("double", {}))
    for line in behaviour.say:
        print(line, flush=True)
    if behaviour.exit_at_start is not None:
        sys.exit(behaviour.exit_at_start)
    if behaviour.ignore_sigint or behaviour.stubborn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if behaviour.stubborn:
        ignore_polite_signals()
    for _ in range(behaviour.daemons):
        start_daemon()
    head_port = settings["head_server"]["port"]
    taken = {head_port}
    if behaviour.occupy is not None and not os.path.exists(behaviour.occupy):
        open(behaviour.occupy, "w").close()
        print("ERROR: [Errno 98] error while attempting to bind: address already in use", flush=True)
        sys.exit(1)
    wrappers = {}
    instances = []
    for name, wanted in behaviour.servers.items():
        port = free_port(settings["port_range_low"], settings["port_range_high"], taken)
        pid = wrapped_server(port, wanted, behaviour)
        wrappers[pid] = name
        instances.append(
            {
                "process_name": name,
                "server_type": wanted["kind"],
                "url": f"http://{wanted.get('host', '127.0.0.1')}:{port}",
                "pid": pid,
            }
        )
    head = Server(settings["head_server"]["host"], head_port)
    threading.Thread(target=head.serve_forever, daemon=True).start()
    try:
        time.sleep(behaviour.list_after_s)
        head.instances = instances
        while True:
            time.sleep(behaviour.poll_s)
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid in wrappers:
                print(f"RuntimeError: Process `{wrappers[pid]}` finished unexpectedly!", flush=True)
                sys.exit(1)
    except KeyboardInterrupt:
        print("Sending interrupt signals to servers...", flush=True)
        if not behaviour.leave_servers:
            for pid in wrappers:
                os.kill(pid, signal.SIGINT)


if __name__ == "__main__":
    main()
