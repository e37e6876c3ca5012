"""The direction of TurboSpec's tables 4 and 5, on fewer tokens: on at a low rate, off where every static k loses."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.simulate import profiles
from outrider_runtime.simulate.assumptions import read_acceptance
from outrider_runtime.simulate.load import Wanted, read_load
from outrider_runtime.simulate.pod import read_pod
from outrider_runtime.simulate.policies import NO_SPECULATION, OURS, PolicyChoice
from outrider_runtime.simulate.run import Scenario, simulate
from outrider_runtime.simulate.summary import RunFigures
from outrider_runtime.simulate.workload import Lengths

MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {name: vicuna}
spec:
  target: {name: lmsys/vicuna-7b-v1.5}
  draftPool:
  - {name: draft, method: DraftModel, draftModel: {model: {name: llama-160m}}}
  accelerator: {products: [NVIDIA-L40S]}
  speculation: {maxDraftTokens: 7}
"""


def static(draft_tokens: int) -> PolicyChoice:
    return PolicyChoice(f"k = {draft_tokens}", draft_tokens, "draft")


@pytest.fixture
def figures(tmp_path: Path):
    """(rate, duration, policy) -> figures, for ShareGPT's lengths and acceptance (the paper's tables 2 and 3)."""
    manifest = tmp_path / "service.yaml"
    manifest.write_text(MANIFEST)
    pod = read_pod(manifest, profiles.load("vicuna-7b-l40s-batch-expansion"))
    acceptance = read_acceptance(pod, ["draft=0.62"], [])

    def run(rate: float, duration_s: float, choice: PolicyChoice) -> RunFigures:
        wanted = Wanted(None, rate, None, duration_s, Lengths(227, 256), {}, seed=3)
        load = read_load(wanted)
        scenario = Scenario(pod, acceptance.rules, acceptance.hit_rates, load.source, duration_s, seed=3)
        return simulate(scenario, choice).figures

    return run


def test_at_a_low_rate_speculation_is_on_and_pays(figures):
    """Table 4 at 1 request a second: 2.63 s without, 1.36 s at k = 3, 1.34 s with TurboSpec."""
    ours, without, fixed = (figures(1.0, 12.0, choice) for choice in (OURS, NO_SPECULATION, static(3)))
    assert ours.mean_verified_length > 2
    assert ours.latency_mean_s < 0.7 * without.latency_mean_s
    assert ours.latency_mean_s < 1.1 * fixed.latency_mean_s


def test_at_a_rate_where_every_static_length_loses_speculation_is_off(figures):
    """Table 4 at 16 a second: 13.73 s without, 15.91 s at k = 1, 23.50 s at k = 5, 13.62 s with TurboSpec.

    At 24 a second here: the queue of a long run at 16, in a few seconds.
    """
    ours, without = (figures(24.0, 8.0, choice) for choice in (OURS, NO_SPECULATION))
    assert ours.mean_verified_length < 0.2
    assert ours.latency_mean_s < 1.03 * without.latency_mean_s
    assert figures(24.0, 8.0, static(1)).latency_mean_s > 1.03 * without.latency_mean_s
    assert figures(24.0, 8.0, static(3)).latency_mean_s > 1.2 * without.latency_mean_s
