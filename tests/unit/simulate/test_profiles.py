"""Profiles: what ships is what the sources say, its label is on it, and its error is not hidden."""

from __future__ import annotations

import json
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.profile import DrafterProfile, ExecutionMode, ProfilingResult, StepCost, TargetProfile
from outrider_runtime.control.costs import Shape
from outrider_runtime.simulate import build_profiles, magicdec, profiles, roofline
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.held_out import judge, median_errors
from outrider_runtime.simulate.profile_document import Label, control_cost


def test_the_shipped_profiles_are_those_that_the_sources_give():
    """Fit and derivation are run again: a file that was edited by hand, or a table that was, shows here."""
    built = {profile.name: build_profiles.as_yaml(profile) for profile in build_profiles.shipped()}
    files = {path.stem: path.read_text() for path in profiles.FOLDER.glob("*.yaml")}
    assert files == built


def test_every_shipped_profile_says_how_far_to_trust_it():
    """A label, a source in words, and as much memory as there is."""
    labels = {profile.name: profile.label for profile in profiles.known()}
    assert labels["llama-3.1-8b-h100"] is Label.DERIVED
    assert labels["llama-3.1-8b-8xa100"] is Label.FITTED
    assert labels["smollm2-135m-cpu"] is Label.MEASURED
    assert all(profile.source and profile.kv_tokens for profile in profiles.known())


def test_the_fit_holds_on_rows_of_the_grid_that_it_has_not_seen():
    """MagicDec's A100 grid: within 10% in the median, the bar for the runtime's own profiles."""
    for target in ("llama-2-7b", "llama-3.1-8b"):
        assert magicdec.fit_target(target).error < 0.10


def test_the_grid_holds_the_papers_numbers():
    """Spot checks against Table 1, and its size: 18, 13 and 17 rows."""
    rows = {(row.target, row.draft, row.prefill, row.batch): row for row in magicdec.grid()}
    assert len(rows) == 48
    assert rows["llama-2-7b", "tinyllama-1.1b", 8000, 128].verify_s == pytest.approx(53.78e-3)
    assert rows["llama-3.1-8b", "self", 100000, 32].decode_s == pytest.approx(37.70e-3)


def test_nothing_held_out_goes_into_a_profile(monkeypatch):
    """Profiles come out alike whatever the other GPUs' rows say."""
    before = list(build_profiles.shipped())
    read = magicdec.table

    def without_held_out(name: str):
        assert name not in ("magicdec_table2.csv", "turbospec_figure2.csv")
        return read(name)

    monkeypatch.setattr(magicdec, "table", without_held_out)
    magicdec.grid.cache_clear()
    assert list(build_profiles.shipped()) == before


def test_the_error_on_held_out_rows_is_what_the_documentation_says(repository):
    """The figures of docs/simulator.md are those that --check-profiles prints."""
    text = (repository / "docs" / "simulator.md").read_text()
    for (label, paper, device, part), errors in median_errors(judge()).items():
        row = f"| {label} | {paper}, {device} | {part} | {median(errors):.0%} | {max(errors):.0%} |"
        assert row in text


@given(st.sampled_from(sorted(roofline.devices())), st.integers(1, 8), st.integers(1, 4000), st.integers(0, 100_000))
def test_a_derived_step_takes_as_long_as_the_slower_of_reading_and_computing(device, gpus, tokens, context):
    """The roofline, from the data sheet, whatever the batch: the knee is where the two meet."""
    model, hardware = roofline.models()["llama-3.1-8b"], roofline.devices()[device]
    cost = roofline.derived_cost(model, hardware, gpus, overhead_s=0.0)
    seconds = cost.seconds(Shape(context, tokens, 1)) - 2 * model.layers * (gpus - 1) * roofline.HOP_S
    read_s = (model.weight_bytes + context * model.kv_bytes) / (gpus * hardware.bytes_per_s)
    computed_s = 2 * model.parameters * 1e9 * tokens / (gpus * hardware.flops)
    assert seconds >= max(read_s, computed_s) * 0.999
    assert seconds <= read_s + computed_s + cost.per_batched_token_s * tokens


def test_a_model_too_large_for_the_gpu_is_refused():
    """70B in 16 bits on one H100."""
    with pytest.raises(ValueError, match="129 GiB of weights do not fit on 1 x H100"):
        roofline.kv_tokens(roofline.models()["llama-3.1-70b"], roofline.devices()["h100"], 1)


def measured_result() -> ProfilingResult:
    cost = StepCost(constant_s=0.0125, per_batched_token_s=0.002)
    target = TargetProfile(
        key="k", model="smollm2", product="cpu", device="EPYC", costs={ExecutionMode.RAGGED: cost}, error_percent=1.4,
        measured_at="2026-11-21T00:00:00Z",
    )  # fmt: skip
    drafter = DrafterProfile(
        key="d", name="eagle", cost=cost, autoregressive=True, error_percent=2.0, measured_at="2026-11-21T00:00:00Z"
    )
    return ProfilingResult(target=target, drafters=[drafter])


def test_what_outrider_profile_wrote_is_a_measured_profile(tmp_path):
    """Its result file, and report.json of --report."""
    wire = measured_result().wire()
    for name, document in (
        ("result.json", wire),
        ("report.json", {"result": wire, "measuredSeconds": 80, "shapes": {}}),
    ):
        (tmp_path / name).write_text(json.dumps(document))
        profile = profiles.load(str(tmp_path / name))
        assert profile.label is Label.MEASURED
        assert (profile.target, profile.device, profile.drafters[0].name) == ("smollm2", "EPYC", "eagle")
        assert control_cost(profile.costs[ExecutionMode.RAGGED]).constant_s == 0.0125


def test_a_shipped_profile_may_be_copied_and_changed(tmp_path):
    """The file has the shipped ones' form."""
    path = tmp_path / "mine.yaml"
    text = (profiles.FOLDER / "llama-3.1-8b-h100.yaml").read_text()
    path.write_text(text.replace("kvTokens: 450000", "kvTokens: 1000"))
    assert profiles.load(str(path)).kv_tokens == 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("label: guessed\nname: x\n", "label"),
        ("label: derived\nname: x\ncosts: {ragged: {constantS: -1}}\n", "costs.ragged.constantS"),
        ("[1, 2]", "no latency profile"),
        ("a: [", "cannot read the profile"),
        ('{"schemaVersion": 1}', "holds no measurement of a target"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_field(tmp_path, text, words):
    """Negative times included."""
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(SimulationError, match=words):
        profiles.load(str(path))


def test_an_unknown_profile_lists_those_that_are_known():
    """With their labels."""
    with pytest.raises(SimulationError, match=r"(?s)tpu-v9: no such file.*llama-3.1-8b-h100 \(derived\)"):
        profiles.load("tpu-v9")
