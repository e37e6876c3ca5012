"""Whatever a pod reports within its limits, its service is reconciled, and no word of it steers a terminal."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from outrider_crds.conditions import ConditionType, find_condition
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.status import SpeculativeServiceStatus
from outrider_operator.cluster_model import Observed
from outrider_operator.decide import decide
from outrider_operator.decide.figures.windows import History, names_of, record, windows
from outrider_operator.validation.reports import MOST_BYTES, MOST_COUNT, MOST_ITEMS, runtime_state
from pydantic import BaseModel

from tests.unit.operator.decide.test_properties import assert_sound, canary_measuring, prepared, served
from tests.unit.operator.decide.world import SETTINGS

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b1mtext\r\n\x00\u202e"
TEXTS = st.sampled_from(["", "x" * 257, "y " * 1100, ESCAPE, ESCAPE * 30, "pld", "eagle", "chat", "DFlash"])
NUMBERS = [0, 1, 7, MOST_COUNT]


def reports(annotation: Any) -> st.SearchStrategy[Any]:
    """JSON of a type, at its limits."""
    parts = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType):
        return st.one_of(*(reports(part) for part in parts))
    if typing.get_origin(annotation) is list:
        many = st.sampled_from(NUMBERS).map(lambda number: [number] * MOST_ITEMS)
        return many if parts[0] is int else st.lists(reports(parts[0]), max_size=2)
    if typing.get_origin(annotation) is dict:
        return st.dictionaries(TEXTS, reports(parts[1]), max_size=2)
    if typing.get_origin(annotation) is typing.Annotated:
        return reports(parts[0])
    if annotation is types.NoneType:
        return st.none()
    if issubclass(annotation, BaseModel):
        return st.fixed_dictionaries(
            {field.alias or name: reports(field.annotation) for name, field in annotation.model_fields.items()}
        )
    if issubclass(annotation, StrEnum):
        return st.sampled_from([member.value for member in annotation])
    return {bool: st.booleans(), str: TEXTS}.get(annotation, st.sampled_from(NUMBERS))


REPORT = reports(RuntimeState)


def reporting(observed: Observed, report: dict[str, Any]) -> Observed:
    """`observed` whose pods all answer so, after a minute in which they had counted nothing."""
    state = runtime_state(json.dumps(report).encode())
    assert isinstance(state, RuntimeState), state
    canary = next((known.canary for known in observed.states.values() if known.canary is not None), None)
    if canary is not None and state.canary is not None:
        state = state.model_copy(update={"canary": state.canary.model_copy(update={"id": canary.id})})
    history, names = History(), names_of(observed.service)
    for step, counted in enumerate([RuntimeState(**fresh(state)), state]):
        states = dict.fromkeys(observed.states, counted)
        history = record(history, states, names, len(states), observed.at - 60 + 60 * step, 60.0)
    states = dict.fromkeys(observed.states, state)
    return replace(observed, states=states, figures=windows(history, observed.at, 60.0))


def fresh(state: RuntimeState) -> dict[str, Any]:
    return {name: getattr(state, name) for name, field in RuntimeState.model_fields.items() if field.is_required()}


@pytest.mark.parametrize("world", [served, canary_measuring])
@given(report=REPORT)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_report_at_its_limits_costs_its_own_figures_alone(world: Any, report: dict[str, Any]) -> None:
    """Bug: a drafter's kind of 257 characters raised in decide; the service was not reconciled any more."""
    assume(len(json.dumps(report)) < MOST_BYTES)
    observed = reporting(prepared(world), {**report, "schemaVersion": 1, "ready": True})
    plan = decide(observed, SETTINGS)
    assert_sound(plan, observed)
    assert SpeculativeServiceStatus.model_validate(plan.status.wire()) == plan.status
    written = json.dumps(plan.status.wire(), ensure_ascii=False) + "".join(event.message for event in plan.events)
    assert written.isprintable()


def test_pod_s_sentence_keeps_its_words_and_loses_its_escapes() -> None:
    observed = prepared(served)
    drafters = [{"name": "pld", "loaded": False, "reason": "\x1b[31mno\x1b[0m such \x1b]0;owned\x07file\r\nhere"}]
    own = next(iter(observed.states.values())).wire()
    plan = decide(reporting(observed, {**own, "drafters": drafters}), SETTINGS)
    active = find_condition(plan.status.conditions, ConditionType.SPECULATION_ACTIVE)
    assert active is not None
    assert active.message == "No pod has a drafter loaded. no such file here"
