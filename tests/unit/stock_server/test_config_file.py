"""The file of OUTRIDER_CONFIG while vLLM serves: what the state says of it, which the operator reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider_crds.base import digest
from outrider_crds.existing_pods import config_file
from outrider_crds.runtime_config import HotConfig, config_hash
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.yaml_text import read_documents
from outrider_runtime.local_manifest import LocalService
from outrider_runtime.paths import Paths
from outrider_runtime.server import hot_manifest
from outrider_runtime.server.config import Serving, write_hot
from outrider_runtime.snapshot import blank_state
from outrider_runtime.stock_server.config_file import ConfigFile
from outrider_runtime.stock_server.service_of_flags import service_of_flags

from tests.operator.client import wait_for
from tests.unit.stock_server.test_service_of_flags import on_cpu, vllm_flags

__all__ = ["on_cpu"]

POOL = "draftPool: [{name: lookup, method: PromptLookup, promptLookup: {}}]\n"


class Pod:
    """A file, the engine's view of it, and what the state tells."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file, self._hot = folder / "outrider.yaml", folder / "hot.json"
        self.file.write_text(text)
        service = self.load()
        write_hot(self._hot, service.hot)
        self._serving = Serving(service.boot, service.hot, Paths(run_dir=str(folder), hot_file=str(self._hot)))
        self._followed = ConfigFile(self.file, self.load, self._serving)

    def load(self) -> LocalService:
        return service_of_flags(vllm_flags(), self.file)

    def follow(self) -> None:
        self._followed.follow()

    def state(self, *, is_behind: bool = False) -> RuntimeState:
        """is_behind: the engine has not read the hot config since the start."""
        boot, hot = self._serving.boot, self._serving.hot
        read = hot if is_behind else HotConfig.model_validate_json(self._hot.read_text())
        state = blank_state(boot, hot, started_at=1.0).model_copy(update={"config_hash": config_hash(read)})
        return self._followed.amend(state)

    def digest(self) -> str:
        return digest(read_documents(self.file.read_text())[0])

    def until(self, holds: Callable[[RuntimeState], bool]) -> RuntimeState:
        wait_for("the state", lambda: holds(self.state()), timeout_s=30.0)
        return self.state()


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    monkeypatch.setattr(hot_manifest, "POLL_INTERVAL_S", 0.01)
    return Pod(tmp_path, POOL)


def test_file_in_force_has_the_digest_that_the_operator_knows(pod: Pod) -> None:
    spec = SpeculativeServiceSpec.model_validate(
        {
            "target": {"name": "m"},
            "accelerator": {"products": ["cpu"]},
            "draftPool": [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}}],
            "sloClasses": [{"name": "chat", "tpot": "50ms"}],
        }
    )
    written = config_file(spec)
    pod.file.write_text(str(written).replace("None", "null").replace("'", '"').replace("False", "false"))
    pod.follow()
    assert pod.until(lambda state: state.file_digest != "").file_digest == digest(written)


def test_edit_during_the_engines_start_is_applied(pod: Pod) -> None:
    """Bug: only changes after the start counted, so an edit while the engine loaded its weights was lost."""
    pod.file.write_text(POOL + "speculation: {mode: 'Off'}\n")
    pod.follow()
    state = pod.until(lambda state: state.file_digest == pod.digest())
    assert (state.config_error, state.restart_reason) == ("", "")


def test_edit_is_in_force_once_the_engine_has_read_it(pod: Pod) -> None:
    pod.follow()
    before = pod.until(lambda state: state.file_digest != "").file_digest
    pod.file.write_text(POOL + "speculation: {maxDraftTokens: 3}\n")
    wait_for("the hot config", lambda: '"maxDraftTokens":3' in (pod.file.parent / "hot.json").read_text())
    assert pod.state(is_behind=True).file_digest == before
    pod.until(lambda state: state.file_digest == pod.digest())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("speculation: {maxDraftTokens: 9}\n", "maxDraftTokens is above 5"),
        ("", "the drafters of draftPool are not those of the start"),
    ],
)
def test_edit_that_needs_a_restart_says_which_part(pod: Pod, edit: str, words: str) -> None:
    pod.follow()
    pool = POOL if edit else POOL.replace("{}}]", "{minTokens: 3}}]")
    pod.file.write_text(pool + edit)
    state = pod.until(lambda state: state.restart_reason != "")
    assert words in state.restart_reason
    assert pod.until(lambda state: state.file_digest == pod.digest()).config_error == ""


def test_bad_edit_is_refused_with_its_sentence(pod: Pod) -> None:
    pod.follow()
    before = pod.until(lambda state: state.file_digest != "").file_digest
    pod.file.write_text(POOL + "engine: {}\n")
    state = pod.until(lambda state: state.config_error != "")
    assert "has the fields engine" in state.config_error
    assert state.file_digest == before
    pod.file.write_text(POOL + "speculation: {mode: Static}\n")
    assert pod.until(lambda state: state.file_digest == pod.digest()).config_error == ""
