"""A double of a Gym that somebody else runs: a head server and an agent, for tests of what talks to them.

``gym_http.py [STATUS [OTHER_URL]]`` prints the head server's address. STATUS is what the list of servers is
answered with; OTHER_URL is listed as a further server. A row's ``wanted`` says what becomes of its rollout:
``status``, ``hang_s``, ``reward``, ``body`` (sent as it is). It runs no environment.
"""

from __future__ import annotations

import json
import select
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Head(BaseHTTPRequestHandler):
    # Connections stay, as Gym's do.
    protocol_version = "HTTP/1.1"
    status = 200
    servers: ClassVar[list] = []

    def do_GET(self) -> None:
        if self.path == "/server_instances":
            self.answer(self.status, json.dumps(self.servers).encode())
        else:
            self.answer(404, b"not found")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Agent(Head):
    running = 0
    answered = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path in ("/running", "/answered"):
            self.answer(200, str(getattr(Agent, self.path[1:])).encode())
        else:
            self.answer(200, b"{}")

    def do_POST(self) -> None:
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = row.get("wanted", {})
        with self.lock:
            Agent.running += 1
        try:
            # Whoever asked may leave: then nothing of it runs any more, as the count of those tells.
            left, _, _ = select.select([self.connection], [], [], wanted.get("hang_s", 0.0))
            if left:
                self.close_connection = True
            elif "status" in wanted:
                self.answer(wanted["status"], b"slow down")
            elif "body" in wanted:
                self.answer(200, wanted["body"].encode())
            else:
                self.answer(200, json.dumps(rollout(row, wanted.get("reward", 1.0))).encode())
            with self.lock:
                Agent.answered += not left
        except OSError:
            pass
        finally:
            with self.lock:
                Agent.running -= 1


def rollout(row: dict, reward: float) -> dict:
    """What an agent answers: one turn that saw tokens 1 and 2 and sampled 3 and 4."""
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": row.get("says", "ok")}],
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 4],
        "generation_log_probs": [-0.5, -0.25],
    }
    response = {"output": [message], "incomplete_details": None, "error": None, "status": None}
    return {**row, "response": response, "reward": reward, "score": 0.5}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    agent = Server(("127.0.0.1", 0), Agent)
    Head.servers = [
        {
            "process_name": "the_agent",
            "server_type": "responses_api_agents",
            "url": f"http://127.0.0.1:{agent.server_port}",
        }
    ]
    if sys.argv[2:]:
        Head.servers.append({"process_name": "judge", "server_type": "resources_servers", "url": sys.argv[2]})
    Head.status = int((sys.argv[1:] or ["200"])[0])
    head = Server(("127.0.0.1", 0), Head)
    threading.Thread(target=head.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{head.server_port}", flush=True)
    agent.serve_forever()


if __name__ == "__main__":
    main()
