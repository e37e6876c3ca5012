"""What follows from the declaration of a counter: sums, growth, wire form, metrics."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.counter_sums import MOST_COUNTED
from outrider_crds.counters import AdapterCounters, ArmCounters, DrafterCounters, HistogramState, SLOClassCounters
from outrider_crds.metrics import metric_of
from outrider_crds.runtime_state import DrafterReport, ServiceCounters

BY_NAME = (DrafterCounters, SLOClassCounters, AdapterCounters, ArmCounters)
COUNTS = st.integers(0, 10**9)
NAMES = st.sampled_from(["chat", "bulk", "eagle"])


def classes() -> st.SearchStrategy[SLOClassCounters]:
    buckets = st.lists(COUNTS, min_size=28, max_size=28)
    tpot = st.builds(HistogramState, counts=buckets, sum_s=COUNTS.map(float))
    return st.builds(SLOClassCounters, finished=COUNTS, attained=COUNTS, tpot=tpot)


SERVICES = st.builds(
    ServiceCounters,
    steps=COUNTS,
    busy_s=COUNTS.map(float),
    draft_length_steps=st.lists(COUNTS, min_size=4, max_size=4),
    drafters=st.dictionaries(NAMES, st.builds(DrafterCounters, tried=COUNTS, accepted=COUNTS)),
    slo_classes=st.dictionaries(NAMES, classes()),
)


@pytest.mark.parametrize("model", BY_NAME)
def test_counter_by_name_has_the_label_of_its_group(model: Any) -> None:
    """A query by class or drafter needs no list of labels besides the declaration."""
    for name, field in model.model_fields.items():
        if any(hasattr(note, "bounds_s") for note in field.metadata):
            assert metric_of(model, name).labels[0] == model.METRICS.label


@given(SERVICES, SERVICES)
def test_growth_is_what_was_added(before: ServiceCounters, more: ServiceCounters) -> None:
    """Keys that were not there before are unknown, or were 0 where nothing was before the first part."""
    grown = before + more
    assert grown.since(before).since(ServiceCounters()) == grown.since(before)
    known = {name: counted for name, counted in more.drafters.items() if name in before.drafters}
    assert (grown - before).drafters == known | {
        name: DrafterCounters() for name in before.drafters.keys() - more.drafters.keys()
    }
    assert (grown - before).slo_classes.keys() == before.slo_classes.keys()
    assert (grown - before).steps == more.steps
    assert before + more == more + before


def test_key_that_was_absent_before_is_unknown_not_zero() -> None:
    """Bug: a class that left the spec and returned counted its whole life as one step."""
    life = ServiceCounters(slo_classes={"chat": SLOClassCounters(finished=5200)})
    assert (life - ServiceCounters()).slo_classes == {}
    assert life.since(ServiceCounters()) == life


def test_counter_that_went_down_did_not_grow() -> None:
    assert (DrafterCounters(tried=3, accepted=2) - DrafterCounters(tried=5)) == DrafterCounters(accepted=2)


def test_report_is_read_with_its_counters_alone() -> None:
    report = DrafterReport(name="eagle", loaded=True, tried=3)
    assert DrafterCounters.part_of(report) == DrafterCounters(tried=3)


def test_sum_stays_within_the_bound_and_goes_over_the_wire() -> None:
    most = ArmCounters(requests=MOST_COUNTED, plain_s=MOST_COUNTED)
    assert ArmCounters.model_validate_json((most + most).model_dump_json(by_alias=True)) == most
