"""Documents between releases: what 0.1 wrote is read today, and what is written today is read by 0.1.

tests/contracts/0.1 holds what release 0.1 writes. The files are never changed: a release adds a folder of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.contract import Contract
from outrider_crds.profile import ProfilingResult
from outrider_crds.runtime_config import BootConfig, HotConfig, config_hash, read_hot_config
from outrider_crds.runtime_state import RuntimeState
from outrider_operator.decide.desired.profile_store import read_store, store_data
from outrider_operator.validation.reports import runtime_state
from pydantic import ValidationError

from tests.unit.crds.contract_examples import documents

REPOSITORY = Path(__file__).parents[3]
_MAPS = ("nodeSelector", "drafters", "costs", "failures.json", "s")
"""Objects whose keys are no fields; "s" is the drafter key of the failure in the example."""
FROZEN = {path.stem: json.loads(path.read_text()) for path in (REPOSITORY / "tests/contracts/0.1").glob("*.json")}


def _profiles(text: str) -> Any:
    """A profile's ConfigMap as the operator reads it and would write it again."""
    data = {name: json.dumps(document) for name, document in json.loads(text).items()}
    return {name: json.loads(document) for name, document in store_data(read_store({"data": data})).items()}


def _state(text: str) -> Any:
    answer = runtime_state(text.encode())
    assert isinstance(answer, RuntimeState), answer
    return answer.wire()


READ: dict[str, Callable[[str], Any]] = {
    "state": _state,
    "boot-config": lambda text: BootConfig.read(text).wire(),
    "hot-config": lambda text: HotConfig.read(text).wire(),
    "profiling-result": lambda text: ProfilingResult.read(text).wire(),
    "profile-config-map": _profiles,
}


def test_every_document_is_frozen() -> None:
    """A contract without its file would change unseen."""
    assert set(FROZEN) == set(READ) == set(documents())


@pytest.mark.parametrize("name", READ)
def test_what_0_1_wrote_is_read_with_every_value(name: str) -> None:
    """A newer operator with older pods, and newer pods with an older operator."""
    assert _holds(READ[name](json.dumps(FROZEN[name])), FROZEN[name])


@pytest.mark.parametrize("name", READ)
def test_fields_of_a_later_release_are_left_out_at_any_depth(name: str) -> None:
    """A reader that refused them would make every upgrade one of all pods at once."""
    known = READ[name](json.dumps(FROZEN[name]))
    assert READ[name](json.dumps(_with_more(FROZEN[name]))) == known


@pytest.mark.parametrize("name", READ)
def test_what_is_written_today_has_all_that_0_1_reads(name: str) -> None:
    """A field that 0.1 wrote keeps its name and its JSON type."""
    assert dict(_types(FROZEN[name])).items() <= dict(_types(documents()[name])).items()


@pytest.mark.parametrize("contract", [RuntimeState, BootConfig, HotConfig, ProfilingResult])
@pytest.mark.parametrize("version", [0, 2])
def test_document_of_another_schema_version_is_refused(contract: type[Contract], version: int) -> None:
    """Misreading it would be worse."""
    name = {RuntimeState: "state", BootConfig: "boot-config", HotConfig: "hot-config"}.get(contract, "profiling-result")
    with pytest.raises(ValidationError, match=f"is {version}, and this release reads 1 to 1: upgrade"):
        contract.read(json.dumps({**FROZEN[name], "schemaVersion": version}))


def test_pod_echoes_the_config_as_it_was_written() -> None:
    """Else `Updated` would wait for ever on pods of another release: one that knows fewer fields, or more."""
    written = FROZEN["hot-config"]
    assert read_hot_config(json.dumps(written).encode())[1] == config_hash(HotConfig.model_validate(written))
    newer = {**written, "budget": 7}
    fewer = {key: value for key, value in written.items() if key != "sloClasses"}
    hashes = {read_hot_config(json.dumps(document).encode())[1] for document in (written, newer, fewer)}
    assert len(hashes) == 3


def test_every_promised_field_is_documented() -> None:
    """docs/reference/contracts.md is the promise; the files say what it covers."""
    text = (REPOSITORY / "docs/reference/contracts.md").read_text()
    fields = {path.rpartition(".")[2] for name in ("state", "profiling-result") for path, _ in _types(FROZEN[name])}
    missing = [field for field in sorted(fields - {"", "[]"}) if f"`{field}`" not in text]
    assert missing == []


def _holds(actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            key in actual and _holds(actual[key], expected[key]) for key in expected
        )
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(_holds(*pair) for pair in zip(actual, expected, strict=True))
    return bool(actual == expected)


def _with_more(value: Any, field: str = "") -> Any:
    """A field of a later release in every object; maps, whose keys are users' names, stay as they are."""
    if isinstance(value, list):
        return [_with_more(item) for item in value]
    if not isinstance(value, dict):
        return value
    inside = {key: _with_more(item, key) for key, item in value.items()}
    return inside if field in _MAPS else {**inside, "ofALaterRelease": 3}


def _types(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    kind = {bool: "bool", int: "number", float: "number", str: "text", dict: "object", list: "list"}[type(value)]
    yield path, kind
    items = value.items() if isinstance(value, dict) else (("[]", item) for item in value) if kind == "list" else ()
    for key, item in items:
        yield from _types(item, f"{path}.{key}")


def test_unknown_values_are_left_out_of_a_boot_config() -> None:
    """A method that was dropped, or that a later release brought, made the whole revision illegible."""
    document = FROZEN["boot-config"]
    pool = [*document["draftPool"], {**document["draftPool"][0], "name": "later", "method": "OfALaterRelease"}]
    later = {**document, "draftPool": pool, "engine": {**document["engine"], "backend": "OfALaterRelease"}}
    read = BootConfig.read_known(json.dumps(later))
    assert [drafter.name for drafter in read.draft_pool] == [drafter["name"] for drafter in document["draftPool"]]
    with pytest.raises(ValidationError, match="target"):
        BootConfig.read_known(json.dumps({**document, "target": 3}))
    with pytest.raises(ValidationError, match="upgrade the reading side"):
        BootConfig.read_known(json.dumps({**document, "schemaVersion": 99}))
