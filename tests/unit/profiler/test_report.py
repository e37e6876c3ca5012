"""What a person who runs `outrider-profile` by hand gets to see."""

from __future__ import annotations

import dataclasses
import io
import json

from outrider_runtime.profiler.report import as_json, print_report, write_report

from tests.unit.profiler.machine import LIMITS, Machine, starter
from tests.unit.profiler.test_failures import profile, service
from tests.unit.profiler.test_fit_recovers import STRAIGHT, OverAWindow


def test_the_table_names_every_shape_its_error_and_what_was_held_out(tmp_path):
    """Measured beside predicted, so that a reader can see where the model is wrong."""
    found = profile(tmp_path, service(tmp_path), starter(Machine(noise=0.05)))
    out = io.StringIO()
    print_report(found, out)
    text = out.getvalue()
    assert "target, uniform steps" in text
    assert "drafter eagle" in text
    held_out = [line for line in text.splitlines() if line.endswith("held out")]
    assert len(held_out) == sum(len(fit.errors) for fit in _fits(found))
    assert f"held-out error {found.target.error_percent:.1f}%" in text


def test_what_could_not_be_measured_stands_in_the_report(tmp_path):
    found = profile(tmp_path, service(tmp_path, vocab_size=7), starter(Machine()))
    out = io.StringIO()
    print_report(found, out)
    assert "not measured: eagle: VocabularyMismatch" in out.getvalue()


def test_a_noisy_machines_measurements_are_shown_though_no_profile_is_given(tmp_path):
    """Who has to find the noisy neighbour needs to see the times."""
    machine = Machine(slows=2.5)
    found = profile(tmp_path, service(tmp_path), starter(machine), clock=machine.clock)
    assert found.target is None
    assert as_json(found)["shapes"]["target, uniform steps"]


def test_json_and_plot_are_written(tmp_path):
    """For a pull request or a notebook: the same figures, and measured over predicted as a picture."""
    found = profile(tmp_path, service(tmp_path), starter(Machine(noise=0.05)))
    write_report(found, tmp_path / "report")
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert document["result"]["target"]["errorPercent"] == found.target.error_percent
    row = document["shapes"]["drafter eagle"][0]
    assert {"batch", "context", "draftTokens", "measuredMs", "predictedMs", "heldOut", "spreadPercent"} <= set(row)
    assert (tmp_path / "report" / "report.png").read_bytes().startswith(b"\x89PNG")


def self_drafting(tmp_path, longest):
    """What is found where requests may take so many tokens."""
    spec = service(tmp_path)
    pool = [{"name": "self", "method": "SparseSelf", "sparseSelf": {"sinkTokens": 16, "windowTokens": 240}}]
    spec = type(spec).model_validate({**spec.wire(), "draftPool": pool})
    limits = dataclasses.replace(LIMITS, max_model_len=longest, kv_tokens=40 * longest)
    machine = Machine(
        drafters={"self": OverAWindow(STRAIGHT)}, target=STRAIGHT.seconds, kv_budgets={"self": 264}, limits=limits
    )
    return profile(tmp_path, spec, starter(machine), names=("self",))


def test_where_a_self_drafting_target_pays_stands_in_the_report(tmp_path):
    """Break-even contexts of the batches that were measured, and MagicDec's S_inflection."""
    found = self_drafting(tmp_path, 131072)
    out = io.StringIO()
    print_report(found, out)
    assert "drafter self, with 80% of its proposals accepted: pays with 1 request from " in out.getvalue()
    document = as_json(found)["longContexts"]["self"]
    assert found.target.most_requests == 32
    assert document["breakEvenTokens"].keys() == {"1", "4", "16"}
    assert 1000 < document["breakEvenTokens"]["16"] < document["breakEvenTokens"]["1"]
    assert document["inflectionTokens"] > 0


def test_a_context_that_no_request_can_have_is_not_told_as_one_that_pays(tmp_path):
    """The report named contexts of 100,000 tokens to engines that take 2,048."""
    found = self_drafting(tmp_path, 2048)
    out = io.StringIO()
    print_report(found, out)
    assert "pays with 1 request at no context within reach" in out.getvalue()
    assert as_json(found)["longContexts"]["self"]["inflectionTokens"] is None


def _fits(found):
    return [*found.fitted_target.values(), *found.fitted_drafters.values()]
