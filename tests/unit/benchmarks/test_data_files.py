"""Scenarios and testbed are data: the shipped files hold, and a wrong one says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from outrider_crds.manifest import load_manifest

from tests.benchmarks.evidence.manifest import base_manifest, with_chunk, with_classes, with_pool
from tests.benchmarks.evidence.prompts import OWN, Data, DataError, load_data
from tests.benchmarks.evidence.scenario import (
    ComparedScenario,
    Cost,
    FileError,
    Size,
    System,
    SystemKind,
    check_names,
    load_scenario,
    load_scenarios,
    load_testbed,
)

GOOD = """
scenario: 4
title: Shifting data
kind: data
repeats: 2
systems: [none, ours]
concurrency: 4
phases: [{name: one, group: high, requests: 4}]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "scenario.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("size", list(Size))
def test_the_shipped_scenarios_are_valid_at_every_size(size: Size) -> None:
    scenarios = load_scenarios(size)
    assert [one.scenario for one in scenarios] == [1, 2, 3, 4, 5, 6, 7]
    check_names(scenarios, load_testbed())


def test_every_comparison_has_ours_and_no_speculation() -> None:
    testbed = load_testbed()
    for scenario in load_scenarios(Size.DEFAULT):
        if isinstance(scenario, Cost):
            continue
        kinds = {testbed.system(name).kind for name in scenario.systems}
        assert {SystemKind.OURS, SystemKind.STOCK, SystemKind.STATIC} <= kinds, scenario.title


def test_every_default_comparison_has_odd_and_even_repeats() -> None:
    compared: list[ComparedScenario] = [one for one in load_scenarios(Size.DEFAULT) if not isinstance(one, Cost)]
    assert all(one.repeats >= 2 for one in compared)


def test_a_size_replaces_only_what_it_names(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD + "quick: {repeats: 1}\n")
    quick, default = (load_scenario(file, size) for size in (Size.QUICK, Size.DEFAULT))
    assert quick == default.model_copy(update={"repeats": 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (GOOD.replace("repeats: 2", "repeats: 0"), "repeats"),
        (GOOD.replace("kind: data", "kind: dta"), "kind"),
        (GOOD + "colour: red\n", "colour"),
        (GOOD.replace("requests: 4", "requests: few"), "phases.0.requests"),
        ("- a list", "must hold fields"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_field(tmp_path: Path, wrong: str, said: str) -> None:
    file = written(tmp_path, wrong)
    with pytest.raises(FileError, match=said) as error:
        load_scenario(file, Size.DEFAULT)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(("old", "new"), [("ours", "theirs"), ("group: high", "group: huge")])
def test_a_name_that_the_testbed_has_not_is_refused(tmp_path: Path, old: str, new: str) -> None:
    scenario = load_scenario(written(tmp_path, GOOD.replace(old, new)), Size.DEFAULT)
    with pytest.raises(FileError, match=new.rpartition(" ")[2]):
        check_names([scenario], load_testbed())


def test_without_the_shared_data_the_small_sets_serve_and_the_run_says_so(tmp_path: Path) -> None:
    data = load_data(shared=tmp_path)
    assert len(data.notes) == 2
    assert all("Spec-Bench" in note or "Azure" in note for note in data.notes)
    testbed = load_testbed()
    for group in testbed.groups:
        assert data.of(testbed.categories(group))


def test_without_any_data_the_error_says_what_and_where_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"spec_bench_even\.jsonl.*Spec-Bench"):
        load_data(shared=tmp_path, own=tmp_path)


def test_a_group_deals_its_categories_in_turn() -> None:
    data = Data({"a": ("a1", "a2", "a3"), "b": ("b1",)}, (), ())
    assert data.of(("a", "b")) == ("a1", "b1", "a2", "a3")
    with pytest.raises(DataError, match="'c'"):
        data.of(("c",))


def test_a_system_gets_its_drafters_and_nothing_else_changes() -> None:
    base = base_manifest(load_testbed())
    changed = with_classes(with_pool(base, ["eagle"]), {"tight": 0.0304, "any": 60.0})
    assert [one["name"] for one in changed["spec"]["draftPool"]] == ["eagle"]
    assert [one["tpot"] for one in changed["spec"]["sloClasses"]] == ["30.40ms", "60000.00ms"]
    assert changed["spec"]["engine"] == base["spec"]["engine"]
    with pytest.raises(FileError, match="medusa"):
        with_pool(base, ["medusa"])


def test_the_small_sets_are_there() -> None:
    assert {file.name for file in OWN.iterdir()} >= {"prompts.jsonl", "arrivals.csv"}


@pytest.mark.parametrize("system", load_testbed().systems, ids=lambda one: one.name)
def test_every_system_is_a_service_that_the_api_takes(system: System) -> None:
    drafters = system.pool or ((system.drafter,) if system.drafter else ())
    manifest = with_pool(base_manifest(load_testbed()), drafters)
    if system.chunk_tokens is not None:
        manifest = with_chunk(manifest, system.chunk_tokens)
    service = load_manifest(yaml.safe_dump(with_classes(manifest, {"tight": 0.0304, "any": 60.0})))
    assert tuple(one.name for one in service.spec.draft_pool) == drafters
    last = [one for one in service.spec.engine.extra_args if one.startswith("--max-num-batched-tokens")][-1]
    assert last == f"--max-num-batched-tokens={system.chunk_tokens or 2048}"
