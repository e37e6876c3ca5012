"""A run that was cut off goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.benchmarks.evidence.raw import RunName, Store, code_version, key_of
from tests.unit.benchmarks.runs import outcome, run

NAME = RunName(1, 2, 0, "ours", "key")
RUN = run("ours", 2, {"high at 4": [outcome(1.5, slo_class="tight")]})


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(RUN)
    assert store.has(NAME)
    assert store.load([NAME, NAME._replace(repeat=3)]) == [RUN]


def test_the_reference_has_a_run_in_each_sitting(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(RUN)
    store.save(replace(RUN, sitting=1))
    assert [one.sitting for one in store.load([NAME, NAME._replace(sitting=1)])] == [0, 1]


def test_results_of_other_code_or_settings_are_not_this_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(replace(RUN, key="old"))
    assert not store.has(NAME)


def test_half_a_file_is_no_result(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(RUN)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:40])
    assert not store.has(NAME)


def test_a_change_of_the_code_that_is_measured_changes_its_version(tmp_path: Path) -> None:
    module = tmp_path / "runtime" / "outrider_runtime" / "control" / "choice.py"
    module.parent.mkdir(parents=True)
    module.write_text("K = 1\n")
    before = code_version(tmp_path)
    assert before == code_version(tmp_path)
    module.write_text("K = 2\n")
    assert code_version(tmp_path) != before


def test_keys_differ_with_settings_and_not_with_their_order() -> None:
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
