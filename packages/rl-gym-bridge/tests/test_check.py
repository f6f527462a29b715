"""The checks of a rollout and the command that makes them, with a small Gym that can be broken."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl_gym_bridge import cli
from rl_gym_bridge.check.command import add_arguments, run_check
from rl_gym_bridge.failures import GymStartError
from rl_gym_bridge.testing import CASE_KEY, ScriptedModelServer
from rl_gym_bridge.testing.gym_run import GymRun
from rl_gym_bridge.testing.model_http import ModelHttpServer, Reply
from rl_gym_bridge.testing.responses_input import chat_messages, chat_tools

TOKENS = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "What is 2 + 2?"}],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": "auto",
    },
    "agent_ref": {"name": "sums"},
    "expected_answer": "4",
}
SCRIPTS = {
    "accepted": [{"tool_calls": [{"name": "add", "arguments": {"a": 2}}]}, {"content": "It is 4."}],
    "rejected": ["It is 5."],
    "expect": {
        "accepted": {"reward": 1, "policy_calls": 2, "answer": {"expected_answer": "4"}},
        "rejected": {"reward": 0.0, "policy_calls": 1},
    },
}


class SmallGym:
    """Head server and one agent, which follow Gym's protocol unless ``broken`` says otherwise."""

    def __init__(self, model: ScriptedModelServer) -> None:
        self.model = model
        self.broken = ""
        self.judge = ""
        self.bodies: list[dict[str, Any]] = []
        self._client = httpx.Client(trust_env=False, verify=False, timeout=10)
        self._server = ModelHttpServer(0, self._answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.close()
        self._client.close()

    def _answer(self, method: str, path: str, body: Any) -> Reply:
        if path == "/server_instances":
            agent = {"process_name": "sums", "url": self.url, "server_type": "responses_api_agents"}
            return Reply.json([agent])
        if path != "/run":
            return Reply.json({})
        self.bodies.append(body)
        return Reply.error(500, "the verifier fell over") if self.broken == "500" else self._run(body)

    def _run(self, body: dict[str, Any]) -> Reply:
        params = dict(body["responses_create_params"])
        if self.broken == "temperature":
            params["temperature"] = 1.0
        messages = chat_messages(params)
        output: list[dict[str, Any]] = []
        while True:
            message = self._ask(params, messages)
            item = {field: list(message[field]) for field in TOKEN_FIELDS}
            if self.broken == "token" and output:
                item["generation_token_ids"][0] += 1
            if self.broken == "logprob":
                item["generation_log_probs"][-1] -= 1 / 512
            calls = message.get("tool_calls") or []
            if not calls:
                break
            call = calls[0]
            output.append({"type": "function_call", "name": "add", "call_id": call["id"], **item})
            output[-1]["arguments"] = call["function"]["arguments"]
            output.append({"type": "function_call_output", "call_id": call["id"], "output": "4"})
            history = {key: value for key, value in message.items() if key not in TOKEN_FIELDS}
            tool = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
            messages = [*messages, history if self.broken == "history" else message, tool]
            if self.broken == "continuity":
                messages[-2] = {**history, "content": "Something else."}
        content = {"type": "output_text", "text": message["content"]}
        output.append({"type": "message", "role": "assistant", "content": [content], **item})
        reward = float(body["expected_answer"] in message["content"])
        if self.judge:
            reward = self._judged()
        echoed = {**params, "tools": []} if self.broken == "echo" else params
        answer = {
            "responses_create_params": echoed,
            "response": {"output": output},
            "reward": 1.0 - reward if self.broken == "reward" else reward,
            "expected_answer": body["expected_answer"],
        }
        return Reply.json(answer)

    def _ask(self, params: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        tools = chat_tools(params)
        if self.broken == "tools":
            tools = tools[1:]
        request = {
            "model": self.model.model,
            "messages": messages,
            "tools": tools,
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "max_tokens": params["max_output_tokens"],
            "tool_choice": params["tool_choice"],
            **TOKENS,
        }
        if self.broken == "top_p":
            request["top_p"] = 1.0
        if self.broken != "metadata":
            request["metadata"] = params["metadata"]
        answer = self._client.post(f"{self.model.base_url}/chat/completions", json=request)
        return answer.raise_for_status().json()["choices"][0]["message"]

    def _judged(self) -> float:
        request = {"model": self.judge, "messages": [{"role": "user", "content": "Is it so?"}]}
        if self.broken == "judge":
            request |= TOKENS
        answer = self._client.post(f"{self.model.base_url}/chat/completions", json=request).json()
        return float(answer["choices"][0]["message"]["content"] == "yes")


@pytest.fixture
def small() -> Iterator[SmallGym]:
    with ScriptedModelServer() as model:
        gym = SmallGym(model)
        yield gym
        gym.close()


class Checked:
    """A check that was made."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Check = Callable[..., Checked]


@pytest.fixture
def check(small: SmallGym, tmp_path: Path) -> Check:
    import argparse

    def attached(gym_config: Any, *, server: Any, python: Any, **more: Any) -> GymRun:
        assert gym_config["config_paths"][-1] == "sums.yaml"
        return GymRun({}, server=small.model, head_url=small.url, **more)

    def run(*rows: Any, arguments: tuple[str, ...] = (), gym_run: Any = attached) -> Checked:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        out, err = io.StringIO(), io.StringIO()
        code = run_check(
            parser.parse_args(["sums.yaml", str(file), "--rollout-timeout", "20", *arguments]),
            gym_run=gym_run,
            out=out,
            err=err,
        )
        return Checked(code, out.getvalue(), err.getvalue())

    return run


def test_a_row_with_scripts_is_accepted_and_rejected(check: Check, small: SmallGym) -> None:
    done = check({**ROW, "check": SCRIPTS})
    assert done.code == 0, done.out
    lines = done.out.splitlines()
    assert [line.split("  (")[0] for line in lines[:3]] == [
        "ok    line 1 accepted",
        "ok    line 1 rejected",
        "ok    line 1",
    ]
    assert lines[-1].endswith("findings of 3 checks are right")
    assert all("check" not in body for body in small.bodies)
    assert small.bodies[0]["responses_create_params"]["metadata"][CASE_KEY] == "line 1 accepted"


def test_a_row_without_scripts_gets_a_generic_answer(check: Check) -> None:
    done = check(ROW)
    assert done.code == 0, done.out
    assert done.out.startswith("ok    line 1  (")


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("reward", "the reward"),
        ("reward", "the accepted answer earns more than the rejected one"),
        ("logprob", "call 0: generation_log_probs reaches Gym's answer"),
        ("logprob", "turn 0: log-probabilities"),
        ("temperature", "the agent gets the run's temperature"),
        ("temperature", "call 0 asks with the right parameters"),
        ("top_p", "call 0 asks with the right parameters"),
        ("tools", "call 0 offers the row's tools"),
        ("echo", "the agent keeps the row's request parameters"),
        ("history", "call 1: the history gives the tokens back"),
        ("token", "call 1: generation_token_ids reaches Gym's answer"),
        ("continuity", "the rollout is a sample"),
        ("500", "the rollout is a sample"),
    ],
)
def test_a_broken_environment_is_found_out(check: Check, small: SmallGym, fault: str, finding: str) -> None:
    small.broken = fault
    done = check({**ROW, "check": SCRIPTS})
    assert done.code == 1
    assert f"\n      {finding}\n" in done.out
    assert "GymTimeout" not in done.out
    assert "WRONG line 1" in done.out


def test_an_agent_that_drops_metadata_is_checked_all_the_same(check: Check, small: SmallGym) -> None:
    small.broken = "metadata"
    done = check({**ROW, "check": SCRIPTS})
    assert done.code == 0, done.out


@pytest.mark.parametrize(("judge", "fault", "code"), [("own", "", 0), ("policy", "", 0), ("own", "judge", 1)])
def test_a_judge_says_what_the_script_says(
    check: Check, small: SmallGym, judge: str, fault: str, code: int
) -> None:
    small.judge = small.model.judge_model if judge == "own" else small.model.model
    small.broken = fault
    scripts = {
        "accepted": ["It is 4."],
        "rejected": ["It is 5."],
        "judge": {"accepted": ["yes"], "rejected": ["no"]},
        "expect": {"accepted": {"reward": 1.0, "judge_calls": 1, "policy_calls": 1}},
    }
    done = check({**ROW, "check": scripts})
    assert done.code == code, done.out
    assert ("judge call 0 asks for no tokens" in done.out) is bool(fault)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "the row is a list"),
        ({"agent_ref": {"name": "sums"}}, "responses_create_params"),
        ({**ROW, "check": {"acepted": ["x"]}}, "check has no 'acepted'"),
        ({**ROW, "check": {"accepted": []}}, "check.accepted: a script needs at least one turn"),
        ({**ROW, "check": {"accepted": ["x"], "expect": {"rejected": {}}}}, "has no check.rejected"),
        ({**ROW, "check": {"accepted": ["x"], "expect": {"accepted": {"reward": "1"}}}}, "not a number"),
        ({**ROW, "check": {}}, "neither accepted nor rejected"),
    ],
)
def test_a_faulty_row_is_a_finding_and_the_others_run(check: Check, row: Any, problem: str) -> None:
    done = check(row, ROW)
    assert done.code == 1
    assert problem in done.out
    assert "WRONG line 1 " in done.out
    assert "ok    line 2 " in done.out


def test_gym_is_not_started_for_faulty_rows_alone(check: Check) -> None:
    done = check("{", gym_run=None)
    assert done.code == 1
    assert "1 of 1 findings are wrong" in done.out


def test_rows_without_an_agent_get_the_only_one(check: Check) -> None:
    row = {key: value for key, value in ROW.items() if key != "agent_ref"}
    assert check(row).code == 0
    done = check(row, arguments=("--agent", "products"))
    assert done.code == 1
    assert "Gym has the agent" in done.out
    assert "products" in done.out


def test_scripts_may_stand_beside_the_rows(check: Check, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts.json"
    scripts.write_text(json.dumps({"2": SCRIPTS, "named": SCRIPTS}))
    done = check(ROW, ROW, {**ROW, "row_id": "named"}, arguments=("--scripts", str(scripts)))
    assert done.code == 0, done.out
    assert [name for name in ("line 1  ", "line 2 accepted", "line 3 rejected") if name not in done.out] == []
    done = check(ROW, arguments=("--scripts", str(scripts)))
    assert done.code == 2
    assert "scripts for no row" in done.err


def test_a_limit_runs_the_first_rows(check: Check, small: SmallGym) -> None:
    assert check(ROW, ROW, ROW, arguments=("--limit", "2")).code == 0
    assert len(small.bodies) == 2


def test_the_json_report_holds_everything(check: Check, small: SmallGym, tmp_path: Path) -> None:
    small.broken = "top_p"
    report = tmp_path / "report.json"
    check(ROW, arguments=("--json", str(report)))
    document = json.loads(report.read_text())
    assert document["passed"] is False
    (one,) = document["checks"]
    (finding,) = [item for item in one["findings"] if not item["passed"]]
    assert finding == {
        "name": "call 0 asks with the right parameters",
        "passed": False,
        "expected": "top_p: 0.875",
        "got": "top_p: 1.0",
    }


def test_colours_are_for_terminals() -> None:
    from rl_gym_bridge.check.report import report_text
    from rl_gym_bridge.testing import CaseReport, Finding

    report = CaseReport("x", (Finding("y", False, "1", "2"),))
    assert "\x1b" not in report_text(report)
    assert "\x1b[31mWRONG\x1b[0m" in report_text(report, colours=True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--scripts", "nowhere.json"), "nowhere.json cannot be read"),
        (("--json", "nowhere/a.json"), "no such folder"),
    ],
)
def test_wrong_usage_is_told_before_gym_starts(
    check: Check, arguments: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = check(ROW, arguments=arguments, gym_run=None)
    assert done.code == 2
    assert problem in done.err
    assert done.out == ""


def test_a_gym_that_does_not_start_is_no_finding(check: Check) -> None:
    class Dead:
        version = "0.4.0"

        def __enter__(self) -> None:
            raise GymStartError("it ended", component="gym", remedy="read its log")

        def __exit__(self, *exc_info: object) -> None: ...

    done = check(ROW, gym_run=lambda *_, **__: Dead())
    assert done.code == 2
    assert "gym: it ended; read its log" in done.err


def test_the_command_line_without_a_gym_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RL_GYM_PYTHON", raising=False)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW))
    assert cli.main(["check", "sums.yaml", str(file)]) == 2
    assert "RL_GYM_PYTHON" in capsys.readouterr().err
    assert cli.main(["check", "sums.yaml", str(tmp_path / "nothing.jsonl")]) == 2
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", "sums.yaml", str(file), "--limit", "0"])
    assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0


def test_a_rollout_that_was_given_up_does_not_spoil_the_next(check: Check, small: SmallGym) -> None:
    """The agent goes on asking while the next rollouts run."""
    slow = {"accepted": [{"tool_calls": [{"name": "add", "arguments": {}}], "delay_s": 0.3}]}
    done = check({**ROW, "check": slow}, ROW, ROW, ROW, arguments=("--rollout-timeout", "1"))
    assert "WRONG line 1 accepted" in done.out
    assert "GymTimeout" in done.out
    assert done.out.count("\nok    line") == 3


def test_a_judges_script_ends_with_its_row(check: Check, small: SmallGym) -> None:
    small.judge = small.model.judge_model
    scripts = {
        "accepted": ["It is 4."],
        "judge": {"accepted": ["yes"]},
        "expect": {"accepted": {"reward": 1}},
    }
    usual = {"accepted": ["It is 4."], "expect": {"accepted": {"reward": 0}}}
    done = check({**ROW, "check": scripts}, {**ROW, "check": usual})
    assert done.code == 0, done.out


def test_nothing_of_a_check_is_left(check: Check, small: SmallGym) -> None:
    before = threading.active_count()
    check({**ROW, "check": SCRIPTS})
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{small.model.url}/health", trust_env=False, verify=False)
    assert threading.active_count() <= before
