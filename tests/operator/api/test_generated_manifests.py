"""Generated manifests: the API server and `serve -f` judge them alike, and accepted ones can be run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from outrider_operator.cluster_model import Object, Observed, OperatorSettings
from outrider_operator.decide import decide

from tests import corpus
from tests.operator.api import generated
from tests.operator.api.apply import ApiServer, Refused

pytestmark = pytest.mark.cluster

_SETTINGS = OperatorSettings(
    runtime_image_gpu="outrider/runtime:1", runtime_image_cpu="outrider/runtime-cpu:1", allowed_host_paths=("/",)
)
_START = 1_800_000_000.0
# The same manifests in every run. Without shrinking: each example asks the API server.
_examples = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@_examples
@given(spec=generated.good())
def test_accepted_manifest_has_children_the_api_server_accepts(apiserver: ApiServer, spec: dict[str, Any]) -> None:
    """A manifest that is accepted and whose Deployment or profiling Job is then refused would never serve."""
    manifest = generated.text(spec)
    assert generated.problems(manifest) == []
    stored = apiserver.dry_run(manifest)
    assert not isinstance(stored, Refused), f"{manifest}\n{stored}"
    for child in _children(stored):
        refused = apiserver.dry_run_child(child)
        assert not isinstance(refused, Refused), f"{manifest}\n{child['kind']}: {refused}"


def test_fields_of_a_pod_patch_reach_the_api_server(apiserver: ApiServer) -> None:
    """What Kubernetes has and Outrider does not know goes through both: admission, and the Deployment."""
    stored = apiserver.dry_run(corpus.good()["pod-patch"])
    assert not isinstance(stored, Refused), stored
    for child in _children(stored):
        refused = apiserver.dry_run_child(child)
        assert not isinstance(refused, Refused), f"{child['kind']}: {refused}"


@_examples
@given(spec=generated.near_good())
def test_changed_manifest_gets_one_verdict_from_both_readers(apiserver: ApiServer, spec: dict[str, Any]) -> None:
    """One mistake: both refuse it and say why, or both take it."""
    manifest = generated.text(spec)
    stored, problems = apiserver.dry_run(manifest), generated.problems(manifest)
    assert isinstance(stored, Refused) == bool(problems), f"{manifest}\nAPI server: {stored}\nserve: {problems}"
    if isinstance(stored, Refused):
        assert ": " in stored.message
        assert all(": " in problem for problem in problems)
    else:
        for child in _children(stored):
            refused = apiserver.dry_run_child(child)
            assert not isinstance(refused, Refused), f"{manifest}\n{child['kind']}: {refused}"


def _children(service: Object) -> list[Object]:
    """All that the operator would make for it on its first look."""
    spec = {**service["spec"], "metrics": {"source": "Pods"}, "paused": False}
    plan = decide(Observed(service={**service, "spec": spec}, at=_START), _SETTINGS)
    children = [*plan.create, *plan.apply]
    assert plan.status.conditions[0].status == "True", plan.status.conditions[0]
    assert children
    return children
