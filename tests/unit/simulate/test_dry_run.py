"""`outrider-simulate --system`: a GPU that is not at hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from outrider_runtime.simulate import dry_run, dry_run_report
from outrider_runtime.simulate.dry_run import Row
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.main import main
from outrider_runtime.simulate.replay.workload import Lengths
from outrider_runtime.simulate.worlds.models import shape_of
from outrider_runtime.simulate.worlds.shapes import LLAMA_8B

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-h200.yaml"
composes = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="the extra `bench` is not installed"
)


def row(rate: float, draft_length: float) -> Row:
    return Row(rate, 100.0, 1.0, 1.0, draft_length, (), ())


def test_the_crossover_is_the_first_rate_at_which_nothing_is_verified():
    assert "From 20.0 requests" in dry_run.crossover([row(10, 3.0), row(20, 0.02), row(30, 0.0)])
    assert "every rate up to 20.0" in dry_run.crossover([row(10, 3.0), row(20, 1.0)])


def test_a_manifest_without_a_system_or_a_profile_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--manifest", str(EXAMPLE)])
    assert ended.value.code == 2
    assert "one of --system and --profile" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is not None, reason="the extra is installed")
def test_without_the_extra_a_sentence_says_what_to_install(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--manifest", str(EXAMPLE), "--system", "h200_sxm"])
    assert ended.value.code == 2
    assert "outrider[bench]" in capsys.readouterr().err


@composes
def test_a_model_is_known_whoever_publishes_it():
    assert shape_of("me/Llama-3.1-8B-Instruct") == LLAMA_8B
    with pytest.raises(SimulationError, match="no configuration of nobody/none"):
        shape_of("nobody/none")


@composes
def test_a_system_that_nobody_measured_is_refused_with_its_name():
    with pytest.raises(SimulationError, match="abacus"):
        dry_run.plan(EXAMPLE, "abacus", 0.7, Lengths())


@composes
def test_the_example_gains_at_low_load_and_says_how_its_times_came_about(capsys, tmp_path, monkeypatch):
    """The table, the document and the plot are there; at the lowest rate ours is faster than plain decoding."""
    import sys

    monkeypatch.setattr(dry_run, "REQUESTS", 12)
    plan = dry_run.plan(EXAMPLE, "h200_sxm", 0.7, Lengths(200, 48))
    rows = list(dry_run.rows(plan, dry_run.rates(plan)[:1]))
    dry_run_report.print_setting(plan, sys.stdout)
    dry_run_report.print_rows(plan, rows, sys.stdout)
    said = capsys.readouterr().out
    assert "aiconfigurator-core" in said
    assert "derived:" in said
    assert rows[0].speedup > 1.2
    assert {path.name for path in dry_run_report.write(tmp_path, plan, rows)} >= {"dry-run.json"}
