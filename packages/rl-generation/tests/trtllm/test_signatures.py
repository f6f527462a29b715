"""The double is what the contract says, and a contract that the package breaks is noticed."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.trtllm_signatures import CONTRACT, compare, main

Contract = dict[str, Any]


@pytest.fixture
def contract() -> Contract:
    """The contract, for changing."""
    return json.loads(CONTRACT.read_text(encoding="utf-8"))


def entry(contract: Contract, path: str) -> Any:
    (found,) = [e for part in ("callables", "fields", "values") for e in contract[part] if e["path"] == path]
    return found


def test_the_double_has_everything_that_is_called(
    double: Any, contract: Contract, release: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert f"tensorrt_llm {release} (the double)" in said
    assert "WRONG" not in said
    assert ("pause_generation" in said) is (release == "1.2.1")
    assert said.count("done without") == (8 if release == "1.2.1" else 1)


def _another_argument(contract: Contract) -> None:
    entry(contract, "tensorrt_llm.AsyncLLM.release")["parameters"].append("level")


def _an_argument_less(contract: Contract) -> None:
    entry(contract, "tensorrt_llm.AsyncLLM.update_weights")["parameters"].clear()


def _another_setting(contract: Contract) -> None:
    entry(contract, "tensorrt_llm.SamplingParams")["parameters"].append("top_h")


def _another_method(contract: Contract) -> None:
    contract["callables"].append({"path": "tensorrt_llm.AsyncLLM.fly", "parameters": []})


def _no_coroutine(contract: Contract) -> None:
    del entry(contract, "tensorrt_llm.AsyncLLM.setup_async")["coroutine"]


def _a_coroutine(contract: Contract) -> None:
    entry(contract, "tensorrt_llm.AsyncLLM.shutdown")["coroutine"] = True


def _another_field(contract: Contract) -> None:
    entry(contract, "tensorrt_llm.executor.result.CompletionOutput")["names"].append("colour")


def _another_tag(contract: Contract) -> None:
    entry(contract, "tensorrt_llm.llmapi.llm_args.ExecutorMemoryType")["has"].append("attic")


def _another_module(contract: Contract) -> None:
    contract["callables"].append({"path": "tensorrt_llm.nowhere.Thing", "parameters": []})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_another_argument, "takes no 'level'"),
        (_an_argument_less, "wants 'weights'"),
        (_another_setting, "takes no 'top_h'"),
        (_another_method, "fly"),
        (_no_coroutine, "is a coroutine"),
        (_a_coroutine, "is no coroutine"),
        (_another_field, "no field 'colour'"),
        (_another_tag, "no value 'attic'"),
        (_another_module, "nowhere"),
    ],
)
def test_a_difference_is_named(
    double: Any, contract: Contract, change: Callable[[Contract], None], named: str, tmp_path: Path
) -> None:
    broken = copy.deepcopy(contract)
    change(broken)
    (complaint,) = compare(broken)[0]
    assert named in complaint
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(broken))
    assert main(["--contract", str(file)]) == 1


def test_without_the_package_nothing_is_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "contract.json"
    file.write_text(json.dumps({"package": "tensorrt_llm_is_not_here"}))
    assert main(["--contract", str(file)]) == 2
    assert "not installed" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported_is_not_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed_engine.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "contract.json"
    file.write_text(json.dumps({"package": "half_installed_engine"}))
    assert main(["--contract", str(file)]) == 2
    assert "libcuda.so.1" in capsys.readouterr().out


def test_the_double_refuses_what_the_contract_does_not_know(double: Any) -> None:
    with pytest.raises(TypeError):
        double.SamplingParams(max_tokens=3, frequency_penalty=1.0)
    with pytest.raises(TypeError, match="garden"):
        double.AsyncLLM(model="m", backend="pytorch", skip_tokenizer_init=True, garden=1)
    with pytest.raises(TypeError):
        importlib.import_module("tensorrt_llm.llmapi").KvCacheConfig(enable_block_reuse=True, size=3)


def test_every_entry_says_where_it_was_seen(contract: Contract) -> None:
    for part in ("callables", "fields", "values"):
        for item in contract[part]:
            assert item["seen"], item["path"]
            assert item["since"], item["path"]
