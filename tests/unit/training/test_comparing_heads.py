"""training.compare_heads: what it counts in an engine's steps, and what it refuses before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from outrider_runtime.control.plans import DraftPlan, ExecutionMode, Outcome, Purpose, trials

from tests.unit.control import columns
from training.compare_heads import acceptance, main, table_head, table_row


def outcome(verified: int, accepted: int) -> Outcome:
    """The outcome of a step of one request with three proposed tokens."""
    forest, batch = columns.proposals([3]), columns.batch(1)
    plan = DraftPlan(forest.lengths, np.ones(1, np.int64), forest.drafter_order, batch.missing, Purpose.FIXED)
    scored, kept = columns.kept(forest, [verified]), columns.kept(forest, [accepted])
    return Outcome(
        output_at_s=1.0, step_s=0.01, target_s=0.01, draft_s=np.zeros(1), mode=ExecutionMode.UNIFORM,
        tokens=1 + accepted,
        batch=batch, draft_plan=plan, verify_purpose=Purpose.FIXED, forest=forest,
        verified=scored, accepted=kept, tried=trials(forest, scored, kept),
    )  # fmt: skip


def test_position_counts_as_tried_if_those_before_were_accepted():
    """Positions after the first rejection say nothing about the head, nor do those that were not verified."""
    steps = [outcome(3, 3), outcome(3, 1), outcome(3, 0), outcome(1, 1), outcome(0, 0)]
    assert acceptance(steps, 3) == pytest.approx([3 / 4, 1 / 2, 1.0])


def test_position_never_reached_has_no_division_by_zero():
    assert acceptance([outcome(2, 0)], 2) == [0.0, 0.0]


def test_heads_of_both_kinds_are_rows_of_one_table(tmp_path: Path):
    """A step with acceptance 0.5, 0.5 gives 1 + 0.5 + 0.25 tokens."""
    for name, architecture in (("spark", "Qwen3DSparkModel"), ("head", "LlamaForCausalLMEagle3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert table_row(tmp_path / "spark", [0.5, 0.5]) == f"| {tmp_path}/spark | DSpark | 0.500, 0.500 | 1.75 |"
    assert table_row(tmp_path / "head", [0.25]) == f"| {tmp_path}/head | EAGLE-3 | 0.250 | 1.25 |"
    assert [line.count("|") for line in table_head(2).splitlines()] == [5, 5]


def test_folder_without_a_head_is_named_before_the_engine_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A typo is reported before the minutes that an engine takes to start."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is a lighthouse?\nWho keeps it?\n")
    assert main(["--target", str(tmp_path), "--prompts", str(prompts), str(tmp_path / "nowhere")]) == 1
    assert "nowhere has no config.json" in capsys.readouterr().err
