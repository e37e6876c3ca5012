"""What becomes of a create whose name is taken."""

from __future__ import annotations

import copy
from typing import cast

import pytest
from outrider_operator.apply import Applier
from outrider_operator.cache import Cache
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.kinds import Kind, kind_of
from outrider_operator.kubernetes_api import ApiError, KubernetesApi
from outrider_operator.model import (
    COMPONENT_LABEL,
    FIELD_MANAGER,
    MANAGED_BY_LABEL,
    PROFILE,
    PROFILING,
    SERVICE_LABEL,
    Identity,
    Object,
)
from outrider_operator.plan import Plan


class Api:
    """Holds one object and takes none of its name."""

    def __init__(self, present: Object) -> None:
        self._present = present
        self.applied: list[Object] = []

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        del kind, namespace, name
        return self._present

    async def create(self, document: Object) -> Object:
        raise ApiError(409, "AlreadyExists", f"{document['kind']} already exists")

    async def patch(self, patch: Object) -> Object:
        metadata = {**self._present["metadata"], **patch["metadata"], "resourceVersion": "6"}
        return {**self._present, "metadata": metadata}

    async def apply(self, document: Object) -> Object:
        self.applied.append(document)
        return {**document, "metadata": {**document["metadata"], "resourceVersion": "7"}}


def made(kind: str, component: str, service: str = "chat") -> Object:
    """As the operator makes it for `service`."""
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
                owner_reference(Identity(service, "ns", f"uid-{service}"), controller=component == "serving")
            ],
        },
        "spec": {},
    }


CREATED = [("Job", PROFILING), ("ConfigMap", PROFILE), ("ConfigMap", "serving")]


@pytest.mark.parametrize(("kind", "component"), CREATED)
@pytest.mark.parametrize("label", [COMPONENT_LABEL, MANAGED_BY_LABEL, SERVICE_LABEL])
async def test_an_object_that_lost_a_label_is_told_about_not_made_for_ever(
    kind: str, component: str, label: str
) -> None:
    """Decisions do not find it: without a refusal each of them would create it again, and no condition say why."""
    present = made(kind, component)
    del present["metadata"]["labels"][label]
    is_found = label == SERVICE_LABEL and component != "serving"
    assert await _refusals(present, made(kind, component)) == ([] if is_found else ["taken"])


@pytest.mark.parametrize(("kind", "component"), CREATED)
async def test_what_another_projects_service_owns_is_told_about(kind: str, component: str) -> None:
    """Its kind has the same name, and is of another API group: the cache does not keep it."""
    present = made(kind, component)
    present["metadata"]["ownerReferences"][0]["apiVersion"] = "example.org/v1"
    assert await _refusals(present, made(kind, component)) == ["taken"]


@pytest.mark.parametrize(("kind", "component"), CREATED[:2])
async def test_a_shared_object_that_another_service_made_first_is_no_refusal(kind: str, component: str) -> None:
    """The next decision sees it and joins."""
    assert await _refusals(made(kind, component, "other"), made(kind, component)) == []


@pytest.mark.parametrize(("decided_on", "applied_to"), [(None, None), ("5", "6"), ("4", "4")])
async def test_the_first_change_of_an_object_takes_one_look(decided_on: str | None, applied_to: str | None) -> None:
    """It was made by a create, so its fields are claimed first: that gives it a version that nobody else has seen.

    A change that was decided on an older state is still refused by the API server.
    """
    present = made("ConfigMap", PROFILE)
    present["metadata"]["managedFields"] = [{"manager": FIELD_MANAGER, "operation": "Update", "fieldsV1": {}}]
    wanted = made("ConfigMap", PROFILE)
    del wanted["metadata"]["resourceVersion"]
    wanted["metadata"] |= {"resourceVersion": decided_on} if decided_on else {}
    api = Api(present)
    assert await Applier(cast(KubernetesApi, api), Cache()).carry_out(Plan(apply=(wanted,)), "ns") == ()
    assert [document["metadata"].get("resourceVersion") for document in api.applied] == [applied_to]


async def _refusals(present: Object, wanted: Object) -> list[str]:
    """Names of the writes that were refused; what was not is in the cache."""
    cache = Cache()
    applier = Applier(cast(KubernetesApi, Api(copy.deepcopy(present))), cache)
    rejections = await applier.carry_out(Plan(create=(wanted,)), "ns")
    assert bool(rejections) != (cache.get(kind_of(wanted), "ns", "taken") is not None)
    return [rejection.name for rejection in rejections]
