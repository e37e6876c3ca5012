"""What becomes of a write that the API server does not take, and of a create whose name is taken."""

from __future__ import annotations

import copy
from typing import cast

import pytest
from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.apply import Applier, ApplyOutcome, ObserveAgain
from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    FIELD_MANAGER,
    MANAGED_BY_LABEL,
    PROFILE,
    PROFILING,
    SERVICE_LABEL,
    SERVING,
    Object,
    ServiceIdentity,
)
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.profiling.profile_maps import deletion
from outrider_operator.kinds import JOB, ResourceKind, kind_of
from outrider_operator.plan import Adoption, Annotate, Delete, Plan, Write, component_of


class Api:
    """Holds one object, if any, and answers each create and each delete with an error."""

    def __init__(self, present: Object | None, answer: ApiError | None = None) -> None:
        self._present = present
        self._answer = answer or ApiError(409, "AlreadyExists", "it already exists")
        self.applied: list[Object] = []
        self.preconditions: dict[str, str] = {}

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        del kind, namespace, name
        return self._present

    async def create(self, document: Object) -> Object:
        del document
        raise self._answer

    async def delete(self, document: Object, preconditions: dict[str, str]) -> Object | None:
        del document
        self.preconditions = preconditions
        raise self._answer

    async def patch(self, patch: Object) -> Object:
        assert self._present is not None
        metadata = {**self._present["metadata"], **patch["metadata"], "resourceVersion": "6"}
        return {**self._present, "metadata": metadata}

    async def apply(self, document: Object) -> Object:
        self.applied.append(document)
        return {**document, "metadata": {**document["metadata"], "resourceVersion": "7"}}


def made(kind: str, component: str, service: str = "chat") -> Object:
    """The object as the operator creates it for `service`."""
    return {
        "apiVersion": "batch/v1" if kind == "Job" else "v1",
        "kind": kind,
        "metadata": {
            "name": "taken",
            "namespace": "ns",
            "uid": "uid",
            "resourceVersion": "5",
            "labels": labels(service, component),
            "ownerReferences": [
                owner_reference(ServiceIdentity(service, "ns", f"uid-{service}"), controller=component == "serving")
            ],
        },
        "spec": {},
    }


@pytest.mark.parametrize("status", [400, 403, 413, 422, 500])
async def test_any_error_of_the_api_server_to_a_write_is_a_refusal(status: int) -> None:
    """It answers 500 to a repeated mount path: no condition reported it, and nothing else was written."""
    api = Api(None, ApiError(status, "", "it does not like that"))
    outcome = await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(
        Plan(create=(made("Job", PROFILING),)), "ns"
    )
    (refused,) = outcome.refused
    assert (refused.kind, refused.name, refused.message) == ("Job", "taken", "it does not like that")
    assert refused.component == PROFILING


WRITES = [
    (Delete("ConfigMap", "taken", "uid"), SERVING),
    (Annotate("taken", "uid", {}), SERVING),
    (Adoption("Job", "taken", "uid", {}), PROFILING),
    (deletion("ConfigMap", {"metadata": {"name": "taken"}}), PROFILING),
]


@pytest.mark.parametrize(("write", "component"), WRITES)
def test_a_write_says_what_it_is_for(write: Write, component: str) -> None:
    assert component_of(write) == component


async def test_a_conflict_is_no_refusal() -> None:
    """The API server answers so if two creates conflict in the count of a quota."""
    api = Api(None, ApiError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas"))
    outcome = await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(
        Plan(create=(made("Job", PROFILING),)), "ns"
    )
    assert isinstance(outcome.stopped, ObserveAgain)
    assert outcome.refused == ()


@pytest.mark.parametrize("status", [429, 503])
async def test_an_api_server_that_is_busy_refuses_nothing(status: int) -> None:
    """A spec would be called wrong for a minute's load: the whole reconcile is tried again."""
    api = Api(None, ApiError(status, "", "later"))
    outcome = await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(
        Plan(create=(made("Job", PROFILING),)), "ns"
    )
    assert outcome.refused == ()
    assert isinstance(outcome.stopped, ApiError)


async def test_refusals_before_the_api_server_got_busy_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost with the rest of the round, and no condition reported it while the API server stayed busy."""
    api, answers = Api(None), iter([ApiError(422, "Invalid", "no"), ApiError(503, "", "later")])

    async def create(_: Object) -> Object:
        raise next(answers)

    monkeypatch.setattr(api, "create", create)
    plan = Plan(create=(made("ConfigMap", SERVING), made("Job", PROFILING)))
    outcome = await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(plan, "ns")
    assert [(refusal.kind, refusal.message) for refusal in outcome.refused] == [("ConfigMap", "no")]
    assert isinstance(outcome.stopped, ApiError)


@pytest.mark.parametrize(
    ("seen", "preconditions"), [(None, {"uid": "uid"}), ("5", {"uid": "uid", "resourceVersion": "5"})]
)
async def test_a_deletion_is_of_the_object_as_it_was_seen(seen: str | None, preconditions: dict[str, str]) -> None:
    """A Job's result that came meanwhile went with it."""
    job = made("Job", PROFILING)
    api, cache = (
        Api(job, ApiError(409, "Conflict", "the resourceVersion in the precondition is another one")),
        ObjectCache(),
    )
    cache.seen(JOB, job)
    plan = Plan(delete=(Delete("Job", "taken", "uid", seen),))
    assert await Applier(cast(KubernetesApi, api), cache).carry_out(plan, "ns") == ApplyOutcome(())
    assert api.preconditions == preconditions
    assert cache.get(JOB, "ns", "taken") is not None


CREATED = [("Job", PROFILING), ("ConfigMap", PROFILE), ("ConfigMap", "serving")]


@pytest.mark.parametrize(("kind", "component"), CREATED)
@pytest.mark.parametrize("label", [COMPONENT_LABEL, MANAGED_BY_LABEL, SERVICE_LABEL])
async def test_an_object_that_lost_a_label_is_refused_once(kind: str, component: str, label: str) -> None:
    """Decisions do not find it: without a refusal each of them would create it again, and no condition say why."""
    present = made(kind, component)
    del present["metadata"]["labels"][label]
    is_found = label == SERVICE_LABEL and component != "serving"
    assert await _refusals(present, made(kind, component)) == ([] if is_found else ["taken"])


@pytest.mark.parametrize(("kind", "component"), CREATED)
async def test_an_object_of_another_projects_service_is_refused(kind: str, component: str) -> None:
    """Its kind has the same name, and is of another API group: the cache does not keep it."""
    present = made(kind, component)
    present["metadata"]["ownerReferences"][0]["apiVersion"] = "example.org/v1"
    assert await _refusals(present, made(kind, component)) == ["taken"]


@pytest.mark.parametrize(("kind", "component"), CREATED[:2])
async def test_shared_object_made_first_by_another_is_no_refusal(kind: str, component: str) -> None:
    """The next decision sees it and joins."""
    assert await _refusals(made(kind, component, "other"), made(kind, component)) == []


@pytest.mark.parametrize(("decided_on", "applied_to"), [(None, None), ("5", "6"), ("4", "4")])
async def test_the_first_change_of_an_object_takes_one_look(decided_on: str | None, applied_to: str | None) -> None:
    """It was made by a create, so its fields are claimed first: that gives it a version that no other writer has seen.

    A change that was decided on an older state is still refused by the API server.
    """
    present = made("ConfigMap", PROFILE)
    present["metadata"]["managedFields"] = [{"manager": FIELD_MANAGER, "operation": "Update", "fieldsV1": {}}]
    desired = made("ConfigMap", PROFILE)
    del desired["metadata"]["resourceVersion"]
    desired["metadata"] |= {"resourceVersion": decided_on} if decided_on else {}
    api = Api(present)
    assert await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(
        Plan(apply=(desired,)), "ns"
    ) == ApplyOutcome(())
    assert [document["metadata"].get("resourceVersion") for document in api.applied] == [applied_to]


async def _refusals(present: Object, desired: Object) -> list[str]:
    """Names of the writes that were refused; what was not is in the cache."""
    cache = ObjectCache()
    applier = Applier(cast(KubernetesApi, Api(copy.deepcopy(present))), cache)
    outcome = await applier.carry_out(Plan(create=(desired,)), "ns")
    assert bool(outcome.refused) != (cache.get(kind_of(desired), "ns", "taken") is not None)
    return [rejection.name for rejection in outcome.refused]


class Rewriting(Api):
    """Admission writes one field of what is applied as it likes, or throws an annotation away."""

    async def apply(self, document: Object) -> Object:
        applied = copy.deepcopy(await super().apply(document))
        applied["spec"]["template"]["containers"][0]["imagePullPolicy"] = "Always"
        return applied

    async def patch(self, patch: Object) -> Object:
        assert self._present is not None
        del patch
        return self._present


async def test_a_field_that_admission_changes_is_named() -> None:
    """It was applied again at once, six times a second, and no condition reported it."""
    containers = [{"name": "runtime", "imagePullPolicy": "IfNotPresent"}, {"name": "sidecar"}]
    spec = {"template": {"containers": containers}}
    document = {**made("Deployment", SERVING), "apiVersion": "apps/v1", "spec": spec}
    api = Rewriting(document)
    outcome = await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(Plan(apply=(document,)), "ns")
    (refusal,) = outcome.refused
    assert refusal.is_stored
    place = "spec.template.containers[runtime].imagePullPolicy"
    assert refusal.message == f'{place} is "Always", not "IfNotPresent"'


async def test_an_annotation_that_admission_drops_is_named() -> None:
    api = Rewriting(made("Pod", SERVING))
    mark = Annotate("taken", "uid", {"outrider.dev/product": "cpu"})
    outcome = await Applier(cast(KubernetesApi, api), ObjectCache()).carry_out(Plan(annotate=(mark,)), "ns")
    (refusal,) = outcome.refused
    assert refusal.is_stored
    assert "metadata.annotations" in refusal.message
