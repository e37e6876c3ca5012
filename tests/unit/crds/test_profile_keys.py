"""Which settings a measurement belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.profile_keys import profile_keys
from outrider_crds.spec import SpeculativeServiceSpec


def keys(image: str = "i", **fields: Any) -> tuple[str, str]:
    pool = [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}}]
    document = {"target": {"name": "org/model"}, "accelerator": {"products": ["cpu"]}, "draftPool": pool, **fields}
    keys = profile_keys(SpeculativeServiceSpec.model_validate(document), "cpu", image)
    return keys.target, keys.drafters["lookup"]


def test_a_key_is_that_of_earlier_releases() -> None:
    """The key of release 0.1: an operator that is upgraded measures nothing again."""
    assert keys() == ("c3e70c5ed9", "385074408f")


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": {"backend": "Torch"}}, {"engine": {"dtype": "float32"}}, {"engine": {"maxModelLen": 64}},
        {"image": "j"}, {"target": {"name": "org/other"}},
    ],
)  # fmt: skip
def test_what_moves_a_steps_time_has_a_profile_of_its_own(fields: dict[str, Any]) -> None:
    """The engine is one of them."""
    assert set(keys()).isdisjoint(keys(**fields))


GPU: dict[str, Any] = {"accelerator": {"products": ["A100"]}}
SLICE: dict[str, Any] = {"accelerator": {"products": ["A100"], "resourceName": "nvidia.com/mig-3g.40gb"}}
ATTENTION = [{"name": "VLLM_ATTENTION_BACKEND", "value": "FLASHINFER"}]


def test_a_slice_of_a_gpu_has_a_profile_of_its_own() -> None:
    """A full GPU and a MIG slice of it shared one, and each `reprofile` turned it round."""
    assert set(keys(**GPU)).isdisjoint(keys(**SLICE))


@pytest.mark.parametrize("fields", [{"engine": {"env": ATTENTION}}, {"podTemplate": {"env": ATTENTION}}])
def test_an_environment_that_moves_step_times_has_its_own(fields: dict[str, Any]) -> None:
    assert set(keys()).isdisjoint(keys(**fields))
    assert keys(engine={"env": ATTENTION}) == keys(podTemplate={"env": ATTENTION})


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "HF_ENDPOINT", "value": "http://mirror"},
        {"name": "HTTPS_PROXY", "value": "http://proxy"},
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"},
        {"name": "WANDB_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ],
)
def test_credentials_and_downloads_share_a_profile(variable: dict[str, Any]) -> None:
    assert keys(podTemplate={"env": [variable]}) == keys()


def test_another_token_secret_shares_a_profile() -> None:
    """Two teams measured one model twice, as each had a Secret of its own."""

    def of(secret: str | None) -> tuple[str, str]:
        hub = {"tokenSecretRef": {"name": secret}} if secret else {}
        model = {"name": "org/model", "source": {"hub": hub}}
        eagle = {"model": {"name": "org/eagle", "source": {"hub": hub}}}
        return keys(target=model, draftPool=[{"name": "lookup", "method": "Eagle", "eagle": eagle}])

    assert of("a") == of("b") == of(None)


def test_what_does_not_shares_one() -> None:
    renamed = [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}, "paused": True}]
    assert keys(replicas=3, draftPool=renamed, engine={"backend": "vLLM"}) == keys()


def test_an_optimization_level_has_two_names() -> None:
    """`-O3` in the middle was taken for the value of the option before it."""
    short = keys(engine={"extraArgs": ["--enable-prefix-caching", "-O3"]})
    assert short == keys(engine={"extraArgs": ["--optimization-level=3", "--enable-prefix-caching"]})
    assert short != keys(engine={"extraArgs": ["--enable-prefix-caching", "-O2"]})
