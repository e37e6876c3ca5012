"""Output of `outrider-profile` for users that run it by hand."""

from __future__ import annotations

import dataclasses
import io
import json

from outrider_runtime.profiler.profile_report import as_json, print_report, write_report

from tests.unit.profiler.machine import LIMITS, Machine, starter
from tests.unit.profiler.test_failures import profile, service
from tests.unit.profiler.test_fit_recovers import STRAIGHT, OverAWindow


def test_table_has_every_shape_with_its_error(tmp_path):
    """Measured and predicted times stand side by side, to show where the model is wrong."""
    result = profile(tmp_path, service(tmp_path), starter(Machine(noise=0.05)))
    out = io.StringIO()
    print_report(result, out)
    text = out.getvalue()
    assert "target, uniform steps" in text
    assert "drafter eagle" in text
    held_out = [line for line in text.splitlines() if line.endswith("held out")]
    assert len(held_out) == sum(len(fit.errors) for fit in _fits(result))
    assert f"held-out error {result.target.error_percent:.1f}%" in text


def test_report_has_the_failures(tmp_path):
    result = profile(tmp_path, service(tmp_path, vocab_size=7), starter(Machine()))
    out = io.StringIO()
    print_report(result, out)
    assert "not measured: eagle: VocabularyMismatch" in out.getvalue()


def test_report_has_measurements_of_a_noisy_machine(tmp_path):
    """The times help to find the noisy neighbour."""
    machine = Machine(slows=2.5)
    result = profile(tmp_path, service(tmp_path), starter(machine), clock=machine.clock)
    assert result.target is None
    assert as_json(result)["shapes"]["target, uniform steps"]


def test_report_writes_json_and_plot(tmp_path):
    """JSON has the figures for a notebook; the plot has predicted against measured times."""
    result = profile(tmp_path, service(tmp_path), starter(Machine(noise=0.05)))
    write_report(result, tmp_path / "report")
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert document["result"]["target"]["errorPercent"] == result.target.error_percent
    row = document["shapes"]["drafter eagle"][0]
    assert {"batch", "context", "draftTokens", "measuredMs", "predictedMs", "heldOut", "spreadPercent"} <= set(row)
    assert (tmp_path / "report" / "report.png").read_bytes().startswith(b"\x89PNG")


def self_drafting(tmp_path, longest):
    """Profile of a self-drafting target whose requests may have so many tokens."""
    spec = service(tmp_path)
    pool = [{"name": "self", "method": "SparseSelf", "sparseSelf": {"sinkTokens": 16, "windowTokens": 240}}]
    spec = type(spec).model_validate({**spec.wire(), "draftPool": pool})
    limits = dataclasses.replace(LIMITS, max_model_len=longest, kv_tokens=40 * longest)
    machine = Machine(
        drafters={"self": OverAWindow(STRAIGHT)}, target=STRAIGHT.seconds, kv_budgets={"self": 264}, limits=limits
    )
    return profile(tmp_path, spec, starter(machine), names=("self",))


def test_report_says_where_a_self_drafting_target_pays(tmp_path):
    """Break-even contexts of the batches that were measured, and MagicDec's S_inflection."""
    result = self_drafting(tmp_path, 131072)
    out = io.StringIO()
    print_report(result, out)
    assert "drafter self, with 80% of its proposals accepted: pays with 1 request from " in out.getvalue()
    document = as_json(result)["longContexts"]["self"]
    assert result.target.most_requests == 32
    assert document["breakEvenTokens"].keys() == {"1", "4", "16"}
    assert 1000 < document["breakEvenTokens"]["16"] < document["breakEvenTokens"]["1"]
    assert document["inflectionTokens"] > 0


def test_report_omits_contexts_beyond_the_models_limit(tmp_path):
    """The report named contexts of 100,000 tokens to engines that take 2,048."""
    result = self_drafting(tmp_path, 2048)
    out = io.StringIO()
    print_report(result, out)
    assert "pays with 1 request at no context within reach" in out.getvalue()
    assert as_json(result)["longContexts"]["self"]["inflectionTokens"] is None


def _fits(result):
    return [*result.fitted_target.values(), *result.fitted_drafters.values()]
