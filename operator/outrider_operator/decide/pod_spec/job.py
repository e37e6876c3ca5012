"""What the manifests of profiling and prefetch Jobs share."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import JOB, Object, OperatorSettings, ServiceIdentity
from outrider_operator.decide.ownership import labels
from outrider_operator.decide.pod_spec.container import container, pod_fields
from outrider_operator.decide.pod_spec.patch import patched
from outrider_operator.decide.pod_spec.volumes import model_volumes, scratch_volumes

_IGNORE_DISRUPTIONS = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def job_document(
    owner: ServiceIdentity,
    spec: SpeculativeServiceSpec,
    component: str,
    metadata: Object,
    pod: Object,
    *,
    retries: int = 0,
    failures: tuple[Object, ...] = (),
) -> Object:
    """A Job of one pod. metadata: name, annotations, owners. failures: rules of podFailurePolicy that come first.

    Job and pod have the user's labels too, which queues, meshes and policies select by.
    """
    own_labels = {**spec.pod_template.labels, **labels(owner.name, component)}
    pod_metadata = {"labels": own_labels, "annotations": dict(spec.pod_template.annotations)}
    job = {
        "backoffLimit": retries,
        "completions": 1,
        "parallelism": 1,
        "podFailurePolicy": {"rules": [*failures, _IGNORE_DISRUPTIONS]},
        "template": {"metadata": pod_metadata, "spec": pod},
    }
    metadata = {"namespace": owner.namespace, "labels": own_labels, **metadata}
    return {"apiVersion": "batch/v1", "kind": JOB, "metadata": metadata, "spec": job}


def job_pod(
    spec: SpeculativeServiceSpec,
    settings: OperatorSettings,
    image: str,
    name: str,
    program: Mapping[str, object],
    fields: Object,
) -> Object:
    """A pod that runs once. name: its container's. program: the container's fields; fields: the pod's."""
    volumes = [*model_volumes(spec), *scratch_volumes()]
    pod: Object = {
        **pod_fields(spec, settings, volumes),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        **fields,
        "containers": [{**container(spec, settings, name, image, volumes), **program}],
    }
    return patched(pod, spec.pod_template, name, serving=False)
