"""Whatever Outrider raises before or around vLLM's own start, vLLM starts with the user's flags."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_runtime.stock_server import activity as activities
from outrider_runtime.stock_server import entry_point, start_record, takeover
from outrider_runtime.stock_server.activity import Activity, StepAsideError
from outrider_runtime.stock_server.takeover import TakenEngine
from outrider_runtime.vllm_plugin import patches

from tests.unit.stock_server.test_service_of_flags import vllm_flags

HEAD = {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}
SERVER = SimpleNamespace(name="OPENAI_API_SERVER")


def broken(*_arguments: object, **_keywords: object) -> Any:
    raise ValueError("a fault of Outrider's")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """vLLM's functions that are replaced, by patch."""
    functions: dict[Any, Any] = {
        patches.ENGINE_CONFIG: lambda arguments, *_: f"config of {arguments.model}",
        patches.ENGINE_CLIENT: classmethod(lambda _cls, config: f"client of {config}"),
        patches.SERVER_APP: lambda: "app",
    }
    monkeypatch.setattr(patches, "original", functions.__getitem__)
    monkeypatch.setattr(takeover, "put", functions.__setitem__)
    monkeypatch.setattr(takeover, "check_engine_version", lambda: "0.32")
    monkeypatch.setattr(takeover, "UNDONE", ())
    return functions


def start_server(vllm: dict[Any, Any]) -> tuple[str, str]:
    """The client and the app, as `vllm serve` makes them."""
    config = vllm[patches.ENGINE_CONFIG](vllm_flags(model="m"), SERVER)
    return vllm[patches.ENGINE_CLIENT].__func__(object, config), vllm[patches.SERVER_APP]()


@pytest.mark.parametrize(
    "attribute", ["TakenEngine", "users_speculation", "obstacle", "service_of_flags", "run_folder", "plan_launch"]
)
def test_vllm_starts_whatever_raises_before_its_config(
    vllm: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    monkeypatch.setattr(takeover, attribute, broken)
    takeover.install()
    assert start_server(vllm) == ("client of config of m", "app")


def test_vllm_starts_where_the_metric_cannot_be_made(vllm: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activities, "_gauge", broken)
    monkeypatch.setenv("OUTRIDER", "1")
    monkeypatch.setattr(entry_point, "_MAKES_CONFIGS", "sys")
    entry_point.activate()
    assert start_server(vllm) == ("client of config of m", "app")


def taken_engine(folder: Path) -> tuple[TakenEngine, SimpleNamespace]:
    """An engine with a plan, and the activity that it reports to."""
    plan = SimpleNamespace(
        paths=SimpleNamespace(run_dir=str(folder)), boot=SimpleNamespace(max_draft_tokens=3),
        pool=SimpleNamespace(hosted=[SimpleNamespace(name="draft"), SimpleNamespace(name="lookup")]),
    )  # fmt: skip
    flags = vllm_flags(speculative_config=dict(HEAD))
    engine = TakenEngine(flags, lambda: flags, Activity())
    vars(engine)["_plan"] = plan
    return engine, flags


@pytest.mark.usefixtures("vllm")
def test_vllm_starts_where_the_undoing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, flags = taken_engine(tmp_path)
    for attribute in ("cause", "after_failure", "put"):
        monkeypatch.setattr(takeover, attribute, broken)
    vars(engine)["_theirs"] = {"a patch": None}

    def client(config: Any) -> str:
        if config is not flags:
            raise RuntimeError("no engine today")
        return "vLLM's"

    assert engine.start(client) == "vLLM's"


@pytest.mark.usefixtures("vllm")
def test_log_names_the_users_drafter_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the engine started without the drafter of --speculative-config, and the log named it as active."""
    engine, _ = taken_engine(tmp_path)
    monkeypatch.setattr(takeover, "noted_failures", lambda _plan: {"draft": "its weights are damaged"})
    with caplog.at_level(logging.INFO, logger=entry_point.logger.name):
        engine.start(lambda _config: SimpleNamespace())
    assert "drafter 'draft' of --speculative-config is not used: its weights are damaged" in caplog.messages
    assert caplog.messages[-1] == "Outrider is active: at most 3 draft tokens of lookup"


@pytest.mark.usefixtures("vllm")
def test_failed_client_is_ended_before_the_next_start(tmp_path: Path) -> None:
    """Bug: vLLM forked its engine while the renderer's threads of the failed client ran."""
    ended: list[str] = []

    class Client:
        def __init__(self, config: Any) -> None:
            self.itself = self  # as vLLM's client and its renderer, a cycle
            if config is not flags:
                raise RuntimeError("no engine today")

        def __del__(self) -> None:
            ended.append("client")

    engine, flags = taken_engine(tmp_path)

    def client(config: Any) -> list[str]:
        Client(config)
        return list(ended)

    assert engine.start(client) == ["client"]


def started(engine: TakenEngine) -> list[str]:
    """The configs that vLLM starts; only its own starts."""
    tried: list[str] = []

    def client(config: Any) -> Any:
        tried.append("vLLM's" if isinstance(config, SimpleNamespace) else "Outrider's")
        if tried[-1] == "Outrider's":
            raise RuntimeError("no engine today")

    engine.start(client)
    return tried


@pytest.mark.usefixtures("vllm")
def test_failed_start_is_remembered_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a start probe that allows for one load ended the pod at every start, during the second load."""
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    engine, _ = taken_engine(tmp_path / "run")
    assert started(engine) == ["Outrider's", "vLLM's"]

    next_engine = TakenEngine(vllm_flags(speculative_config=dict(HEAD)), lambda: "config", activity := Activity())
    assert next_engine.config() == "config"
    assert "the last start with these flags failed (RuntimeError: no engine today); delete" in activity.reason

    other_engine = TakenEngine(vllm_flags(), lambda: "config", activity)
    monkeypatch.setattr(takeover, "check_target", broken)
    assert other_engine.config() == "config"
    assert activity.reason == "ValueError: a fault of Outrider's"


def stop_start(folder: Path) -> None:
    def client(_config: Any) -> Any:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        taken_engine(folder)[0].start(client)


def earlier_starts() -> str:
    """Why a start with Outrider is refused; empty if it is not."""
    try:
        taken_engine(Path())[0]._record.check()
    except StepAsideError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("vllm")
def test_outrider_is_tried_once_more_after_a_stopped_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a claim, a start that a drained node had stopped left Outrider off until the note was deleted."""
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    stop_start(tmp_path / "run")
    assert not earlier_starts()
    stop_start(tmp_path / "run")
    assert "the last 2 starts with these flags were stopped" in earlier_starts()


@pytest.mark.usefixtures("vllm")
def test_nothing_is_remembered_of_a_start_that_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    stop_start(tmp_path / "run")
    taken_engine(tmp_path / "run")[0].start(lambda _config: SimpleNamespace())
    assert not list(tmp_path.glob("start-*"))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("changed", ["file", "version", "note"])
def test_another_start_is_not_refused_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Bug: a mended OUTRIDER_CONFIG, or a newer Outrider, was refused for the failure of the former."""
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    file = tmp_path / "config.yaml"
    file.write_text("draftPool: []")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(file))
    started(taken_engine(tmp_path / "run")[0])
    assert "no engine today" in earlier_starts()
    if changed == "file":
        file.write_text("sloClasses: []")
    elif changed == "version":
        monkeypatch.setattr(start_record, "outrider_version", lambda: "9.9")
    else:
        next(tmp_path.glob("start-*")).write_text('{"stopped": "many"}')
    assert not earlier_starts()
