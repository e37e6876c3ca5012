"""A run that was cut off goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.benchmarks.evidence.raw import Store, code_version, key_of
from tests.unit.benchmarks.runs import outcome, run

RUN = run("ours", 2, {"high at 4": [outcome(1.5, slo_class="tight")]})


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(RUN)
    assert store.has(1, 2, "ours", "key")
    assert store.load([(1, 2, "ours", "key"), (1, 3, "ours", "key")]) == [RUN]


def test_results_of_other_code_or_settings_are_not_this_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(replace(RUN, key="old"))
    assert not store.has(1, 2, "ours", "key")


def test_half_a_file_is_no_result(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(RUN)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:40])
    assert not store.has(1, 2, "ours", "key")


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
