"""A manifest on hardware: whose step times, whose proposals, and what is left out."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
import yaml
from outrider_runtime.control.settings import SLOClass
from outrider_runtime.simulate import comparison, load, service_manifest, simulated_deployment
from outrider_runtime.simulate.comparison import PolicyFigures
from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.replay.recorded_proposals import mean_acceptance_rates
from outrider_runtime.simulate.replay.workload import Lengths
from outrider_runtime.simulate.service_manifest import Member, Service
from outrider_runtime.simulate.worlds.named_models import find_shape
from outrider_runtime.simulate.worlds.shapes import LLAMA_8B
from outrider_runtime.simulate.worlds.world import BlockPass

composes = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="the extra `bench` is not installed"
)


def with_pool(simulated: Service, **recorded_as: str) -> Service:
    members = tuple(
        Member(dataclasses.replace(service_manifest.TRAITS[kind], name=name), kind, "meta-llama/Llama-3.2-1B")
        for name, kind in recorded_as.items()
    )
    return dataclasses.replace(simulated, pool=members)


@pytest.fixture
def service(manifest) -> Service:
    return service_manifest.read(manifest)


def test_the_manifest_sets_classes_lengths_and_limits(service):
    assert service.hot.slo_classes == (SLOClass("tight", 0.006), SLOClass("loose", 0.2))
    assert service.limits.max_requests == 16
    assert service.longest_request == 2048
    assert [member.drafter.name for member in service.pool] == ["head", "ngram"]


def test_window_costs_whole_pages_and_notes_shared_acceptance(manifest):
    """The smallest window looked best, and nothing said that its proposals were those of another one."""
    document = yaml.safe_load(manifest.read_text())
    block = {"sinkTokens": 1, "windowTokens": 2}
    document["spec"]["draftPool"] = [{"name": "self", "method": "SparseSelf", "sparseSelf": block}]
    manifest.write_text(yaml.safe_dump(document))
    service = service_manifest.read(manifest)
    (member,) = service.pool
    assert member.drafter.kv_budget == 16 + 2 * 16 - 8  # pages of 16 tokens, the last one half full
    assert any("'self' is as fast as its window makes it, and as often right as with any other" in notice
               for notice in service.notices)  # fmt: skip


@pytest.mark.slow
def test_two_heads_are_lifted_apart_and_the_better_is_used(service, monkeypatch):
    monkeypatch.setattr(load, "LEAST_REQUESTS", 8)
    world = simulated_deployment.find_world(service, "h100_sxm")
    pair = simulated_deployment.deploy(
        with_pool(service, poor="eagle", good="eagle"), world, {"poor": 0.2, "good": 0.9}
    )
    rates = [mean_acceptance_rates(pair.recording, name)[0] for name in ("poor", "good")]
    assert rates == pytest.approx([0.2, 0.9], abs=0.08)
    requests = load.draw_poisson_load(pair, load.LoadOptions(Lengths(60, 64), 1.0, {}, 0), 4.0)
    rows = comparison.compare_policies(pair, requests, 4.0, comparison.policies(pair, 0, statics=True))
    by_policy = {row.policy: row for row in rows}
    assert by_policy["good, k = 3"].speedup > by_policy["poor, k = 3"].speedup
    assert by_policy["outrider"].speedup > by_policy["poor, k = 3"].speedup


@pytest.mark.slow
def test_a_pool_of_every_kind_runs(service, monkeypatch):
    """A head, a draft model whose times ship, and prompt lookup."""
    monkeypatch.setattr(load, "LEAST_REQUESTS", 8)
    pool = with_pool(service, head="eagle", small="draft", ngram="lookup")
    mixed = simulated_deployment.deploy(pool, simulated_deployment.find_world(pool, "h200_sxm"), {})
    assert not mixed.notices
    requests = load.draw_poisson_load(mixed, load.LoadOptions(Lengths(60, 32), 1.0, {"tight": 1.0}, 0), 40.0)
    assert (requests.slo_class == 0).all()
    for row in comparison.compare_policies(mixed, requests, 40.0, comparison.policies(mixed, 0, statics=False)):
        assert row.attained[1] is None


@pytest.mark.slow
def test_under_overload_ours_lets_in_the_tight_class_first(service, monkeypatch):
    """Ours admits by deadline, like the runtime; plain decoding admits first come, first served."""
    monkeypatch.setattr(load, "LEAST_REQUESTS", 8)
    classes = (SLOClass("tight", 0.05, 0.5), SLOClass("loose", 0.2))
    none = with_pool(dataclasses.replace(service, hot=dataclasses.replace(service.hot, slo_classes=classes)))
    plain = simulated_deployment.deploy(none, simulated_deployment.find_world(none, "h100_sxm"), {})
    requests = load.draw_poisson_load(
        plain, load.LoadOptions(Lengths(100, 64), 2.0, {"tight": 1.0, "loose": 4.0}, 0), 80.0
    )
    ours, other = comparison.compare_policies(plain, requests, 80.0, comparison.policies(plain, 0, statics=False))
    (mine, _), (theirs, _) = ours.attained, other.attained
    assert mine is not None
    assert theirs is not None
    assert mine > 0.9 > theirs


def test_an_empty_pool_is_plain_decoding(service, monkeypatch):
    monkeypatch.setattr(load, "LEAST_REQUESTS", 8)
    none = dataclasses.replace(with_pool(service), hot=dataclasses.replace(service.hot, slo_classes=()))
    plain = simulated_deployment.deploy(none, simulated_deployment.find_world(none, "h100_sxm"), {})
    requests = load.draw_poisson_load(plain, load.LoadOptions(Lengths(60, 16), 1.0, {}, 0), 4.0)
    ours, other = comparison.compare_policies(plain, requests, 4.0, comparison.policies(plain, 0, statics=True))
    assert ours.latency_s == pytest.approx(other.latency_s, rel=1e-3)


def test_a_pool_that_the_times_know_nothing_of_is_refused(service):
    """No figure rather than one of another pool."""
    world = simulated_deployment.load_profiled_world("smollm2-135m-cpu")
    with pytest.raises(SimulationError, match="step times for lookup, eagle only, none of the pool's"):
        simulated_deployment.deploy(with_pool(service, head="eagle"), world, {})


def test_method_without_a_recording_is_refused(manifest):
    document = yaml.safe_load(manifest.read_text())
    document["spec"]["draftPool"] = [{"name": "heads", "method": "Medusa", "medusa": {"model": {"name": "org/heads"}}}]
    document["spec"]["engine"] = {"backend": "Torch"}
    manifest.write_text(yaml.safe_dump(document))
    with pytest.raises(SimulationError, match="drafter 'heads': Medusa is not recorded"):
        service_manifest.read(manifest)


def test_what_the_figures_do_not_cover_is_said(service):
    """A drafter, a target and a number of GPUs that the step times do not know."""
    world = simulated_deployment.load_profiled_world("llama-3.1-8b-8xa100-long")
    notices = simulated_deployment.deploy(dataclasses.replace(service, target="someone/other"), world, {}).notices
    assert "the manifest's target is someone/other; the step times are those of meta-llama/Llama-3.1-8B." in notices
    assert "the manifest splits the target over 1; the step times are those of 8." in notices
    assert any("drafter 'head' is left out" in notice for notice in notices)


@pytest.mark.slow
def test_rates_go_by_what_plain_decoding_finishes(service):
    """Prompts count: at 0.8 of it requests are let in at once, at 1.5 they queue."""
    on_h100 = simulated_deployment.deploy(service, simulated_deployment.find_world(service, "h100_sxm"), {})
    options = load.LoadOptions(Lengths(700, 64), 10.0, {}, 0)
    *_, fastest = load.rates(on_h100, options)

    def ttft_s(rate: float) -> float:
        requests = load.draw_poisson_load(on_h100, options, rate)
        policies = comparison.policies(on_h100, 0, statics=False)
        return next(comparison.compare_policies(on_h100, requests, rate, {"plain": policies["plain"]})).ttft_s

    capacity = fastest / load.SHARES[-1]
    assert ttft_s(0.8 * capacity) < 0.2
    assert ttft_s(1.5 * capacity) > 1.0


def row(rate: float, speedup: float) -> PolicyFigures:
    return PolicyFigures("outrider", rate, 1, 100.0, 1.0, speedup, 0.1, 0.01, 0.01, 1.0, ())


def test_crossover_is_the_first_rate_without_gain_at_later_ones():
    rows = [row(10, 1.5), row(20, 1.01), row(30, 1.1), row(40, 1.0), row(50, 1.01)]
    assert "From 40 requests a second on" in comparison.crossover(rows)
    assert "every rate up to 20 " in comparison.crossover([row(10, 1.5), row(20, 1.2)])


def test_model_with_shipped_times_is_known_for_any_publisher():
    assert find_shape("me/Llama-3.1-8B-Instruct") == LLAMA_8B


@composes
def test_unknown_model_is_refused_with_its_name():
    with pytest.raises(SimulationError, match="no configuration of nobody/none"):
        find_shape("nobody/none")


@composes
def test_unmeasured_system_is_refused_with_the_known_ones(service):
    with pytest.raises(SimulationError, match="abacus; it has a100"):
        simulated_deployment.find_world(service, "abacus")


@composes
def test_what_does_not_ship_is_composed(service):
    """Two H200 in place of one."""
    world = simulated_deployment.find_world(dataclasses.replace(service, gpus=2), "h200_sxm")
    assert world.gpus == 2
    assert np.isfinite(world.kv_tokens)


def test_block_drafter_is_simulated_from_a_head(manifest):
    document = yaml.safe_load(manifest.read_text())
    block = {"model": {"name": "org/dflash"}, "maxTokens": 3}
    document["spec"]["draftPool"] = [{"name": "flash", "method": "Block", "block": block}]
    manifest.write_text(yaml.safe_dump(document))
    service_read = service_manifest.read(manifest)
    deployed = simulated_deployment.deploy(service_read, simulated_deployment.find_world(service_read, "h100_sxm"), {})
    (drafter,), times = deployed.drafters, deployed.world.drafters["flash"]
    assert drafter.is_block
    assert drafter.most_tokens == 3
    assert isinstance(times, BlockPass)
    assert times.tokens == 4
    assert any("'flash' is as often right as an EAGLE head" in notice for notice in deployed.notices)
