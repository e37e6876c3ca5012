"""What the pods that serve, profile and download models share: environment, image, security; and Jobs of one pod."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.model_sources import SecretKeyRef
from outrider_crds.runtime_config import CA_FILE, MODEL_CACHE_DIR
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import JOB, Object, OperatorSettings, ServiceIdentity
from outrider_operator.decide.ownership import labels
from outrider_operator.decide.pod_spec.patch import patched
from outrider_operator.decide.pod_spec.placement import resources
from outrider_operator.decide.pod_spec.volumes import (
    COMPILE_CACHE_DIR,
    HOME_DIR,
    RUN_DIR,
    Mounted,
    model_volumes,
    scratch_volumes,
)

CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
"""Variables by which the hub's client, requests and the S3 client find certificates."""
RUN_AS = 65532
"""User and group of the runtime image (Dockerfile)."""
_UNPRIVILEGED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_IGNORE_DISRUPTIONS = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def container(
    spec: SpeculativeServiceSpec, settings: OperatorSettings, name: str, image: str, volumes: list[Mounted]
) -> Object:
    """The runtime container, without command and probes."""
    template = spec.pod_template
    fields: Object = {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.runtime_image_pull_policy,
        "env": variables_by_name(environment(spec), [variable.wire() for variable in template.env]),
        "envFrom": [source.wire() for source in template.env_from],
        "resources": resources(spec),
        "volumeMounts": [*(v.mount for v in volumes), *(mount.wire() for mount in template.volume_mounts)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # If the process wrote no message, its last log lines go into the pod's status: no right to read logs is needed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {key: value for key, value in fields.items() if value not in ([], {})}


def pod_fields(spec: SpeculativeServiceSpec, settings: OperatorSettings, volumes: list[Mounted]) -> Object:
    """Fields of the pod spec that pods of all three kinds share."""
    fields: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would inject VLLM_PORT, which vLLM takes for its own
        "securityContext": security_context(settings),
        "volumes": [*(v.volume for v in volumes), *(volume.wire() for volume in spec.pod_template.volumes)],
    }
    return {key: value for key, value in fields.items() if value != []}


def security_context(settings: OperatorSettings) -> Object:
    """Security context of a pod. It sets user and group, so that claims are writable, unless the platform assigns them.

    A platform that assigns users refuses pods that set one.
    """
    if settings.platform_assigns_user:
        return _UNPRIVILEGED
    ours = {"runAsUser": RUN_AS, "runAsGroup": RUN_AS, "fsGroup": RUN_AS, "fsGroupChangePolicy": "OnRootMismatch"}
    return {**_UNPRIVILEGED, **ours}


def environment(spec: SpeculativeServiceSpec) -> list[Object]:
    """Environment variables: writable folders, certificates, the hub's token, and the engine's variables."""
    fixed = {
        "HOME": HOME_DIR,
        "USER": "outrider",  # the user id need not be in the image's passwd; torch asks for its name
        "HF_HOME": MODEL_CACHE_DIR,
        "XDG_CACHE_HOME": COMPILE_CACHE_DIR,
        "VLLM_CACHE_ROOT": f"{COMPILE_CACHE_DIR}/vllm",
        "TRITON_CACHE_DIR": f"{COMPILE_CACHE_DIR}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{COMPILE_CACHE_DIR}/inductor",
        "OUTRIDER_RUN_DIR": RUN_DIR,
    }
    fixed |= dict.fromkeys(CA_VARIABLES, CA_FILE) if spec.ca_bundle is not None else {}
    engine: list[Object] = [{"name": variable.name, "value": variable.value} for variable in spec.engine.env]
    ours = [{"name": name, "value": value} for name, value in fixed.items()]
    return variables_by_name(ours, _address(spec), _token(spec), engine)


def _address(spec: SpeculativeServiceSpec) -> list[Object]:
    """The address by which the pods of a group find each other: vLLM would guess it from a route to the internet."""
    own = {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [own] if spec.engine.nodes > 1 else []


def variables_by_name(*groups: list[Object]) -> list[Object]:
    """One variable per name, the last one: a list with two of a name cannot be applied."""
    return list({str(variable.get("name")): variable for group in groups for variable in group}.values())


def _token(spec: SpeculativeServiceSpec) -> list[Object]:
    """The token of target and drafts: the hub's client takes one, and a spec names no two."""
    return [_from_secret("HF_TOKEN", ref) for ref in spec.token_refs[:1]]


def _from_secret(variable: str, ref: SecretKeyRef) -> Object:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}


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
