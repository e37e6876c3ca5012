"""A tiny cluster in memory: it carries out plans as the API server would; tests step its controllers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, cast

import pytest
from outrider_crds import profile
from outrider_crds.conditions import Condition, ConditionType, find_condition
from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.runtime_config import BootConfig, HotConfig, config_hash
from outrider_crds.runtime_state import DrafterReport, RuntimeState
from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    PREFETCH,
    PROFILE,
    PROFILING,
    REVISION_LABEL,
    SERVICE_LABEL,
    SHARED_PROFILE,
    ApiRefusal,
    KindAccess,
    Node,
    Object,
    Observed,
    OperatorSettings,
)
from outrider_operator.decide import decide
from outrider_operator.decide.pod_spec.volumes import profile_shared_as
from outrider_operator.decide.profiling.measurement_request import MeasurementRequest, request_of
from outrider_operator.figure_windows import FigureWindows
from outrider_operator.plan import Plan, component_of, fingerprint

T = TypeVar("T")
START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC).timestamp()
SETTINGS = OperatorSettings(runtime_image_gpu="outrider/runtime:1", runtime_image_cpu="outrider/runtime-cpu:1")


def settings_with(**changes: Any) -> OperatorSettings:
    """`SETTINGS` with `changes`."""
    return SETTINGS.model_copy(update=changes)


PLD = {"name": "pld", "method": "PromptLookup", "promptLookup": {}}
EAGLE = {"name": "eagle", "method": "Eagle", "eagle": {"model": {"name": "org/eagle"}}}


def gpu_node(name: str, product: str, gpus: int = 8) -> Node:
    return Node(
        name, {"nvidia.com/gpu.product": product}, (), {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "1Ti"}
    )


CPU_NODE = Node("node-1", allocatable={"cpu": "2", "memory": "16Gi"})


def manifest(name: str = "chat", **spec: Any) -> Object:
    """A service on cpu with prompt lookup, as the API server would hold it; `spec` replaces fields."""
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "generation": 1},
        "spec": {
            "target": {"name": "org/target"},
            "draftPool": [PLD],
            "accelerator": {"products": ["cpu"]},
            "sloClasses": [{"name": "chat", "tpot": "50ms"}],
            **spec,
        },
    }


def rfc3339(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def copied(documents: T) -> T:
    """What the API server hands out: a copy that shares nothing. A tenth of the time of `copy.deepcopy`."""
    copy: T = pickle.loads(pickle.dumps(documents))
    return copy


_SERVED: dict[bytes, bytes] = {}
"""A world and a service in it, before it is served -> the world and the last plan once it is."""


class World:
    """Objects by (kind, name); one or more services; a clock that tests advance."""

    def __init__(
        self, *services: Object, nodes: tuple[Node, ...] | None = (CPU_NODE,), settings: OperatorSettings = SETTINGS
    ):
        self.services = {service["metadata"]["name"]: copied(service) for service in services}
        self.nodes, self.settings, self.now = nodes, settings, START
        self.objects: dict[tuple[str, str], Object] = {}
        self.replica_sets: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.workers: dict[str, Object] = {}
        """Pods of groups other than their leaders."""
        self.job_pods: dict[str, Object] = {}
        self.states: dict[str, RuntimeState] = {}
        self.shared: dict[str, Object] = {}
        """Profiles in the operator's namespace, by the names that they have in others."""
        self.measured_elsewhere: frozenset[str] = frozenset()
        self.figures = FigureWindows()
        self.warnings: dict[str, str] = {}
        self.provisioning: dict[str, str] = {}
        self.unreachable: dict[str, str] = {}
        self.network_policies: tuple[Object, ...] = ()
        self.refusals: tuple[ApiRefusal, ...] = ()
        self.replica_rivals: tuple[str, ...] = ()
        self.pool_access = KindAccess.SERVED
        self.groups_access = KindAccess.SERVED
        self.prefetch_progress: PrefetchProgress | None = None
        self._refusals: list[tuple[Callable[[Object], bool], str]] = []
        self.created_jobs: list[MeasurementRequest] = []
        self._number = 0

    # --- what the operator does ---

    def observed(self, name: str = "chat") -> Observed:
        def of(documents: dict[str, Object]) -> tuple[Object, ...]:
            return tuple(d for d in documents.values() if d["metadata"]["labels"].get(SERVICE_LABEL) == name)

        maps = {k: d for k, d in self.objects.items() if _label(d, COMPONENT_LABEL) == PROFILE}
        mine = {
            key: document
            for key, document in self.objects.items()
            if key not in maps
            and key[0] != JOB
            and (_label(document, SERVICE_LABEL) == name or key[1] in (name, f"{name}-epp", f"{name}-nodes"))
        }
        return Observed(
            service=copied(self.services[name]),
            at=self.now,
            nodes=self.nodes,
            children=copied(mine),
            replica_sets=of(self.replica_sets),
            pods=copied(of(self.pods)),
            workers=copied(of(self.workers)),
            states={n: s for n, s in self.states.items() if n in self.pods},
            warnings=self.warnings,
            provisioning=self.provisioning,
            unreachable=self.unreachable,
            network_policies=self.network_policies,
            jobs=self._jobs(PROFILING),
            job_pods=tuple(copied(p) for p in self.job_pods.values()),
            prefetch_jobs=tuple(job for job in self._jobs(PREFETCH) if _label(job, SERVICE_LABEL) == name),
            prefetch_pods=tuple(copied(p) for p in self.job_pods.values()),
            prefetch_progress=self.prefetch_progress,
            profiles={key[1]: copied(d) for key, d in maps.items()},
            shared_profiles=copied(self.shared),
            measured_elsewhere=self.measured_elsewhere,
            pool_access=self.pool_access,
            groups_access=self.groups_access,
            figures=self.figures,
            refusals=self.refusals,
            replica_rivals=self.replica_rivals,
        )

    def _jobs(self, component: str) -> tuple[Object, ...]:
        documents = (document for (kind, _), document in self.objects.items() if kind == JOB)
        return tuple(copied(job) for job in documents if _label(job, COMPONENT_LABEL) == component)

    def reconcile(self, name: str = "chat") -> Plan:
        plan = decide(self.observed(name), self.settings)
        self.carry_out(plan, name)
        return plan

    def settle(self, name: str = "chat", most: int = 8) -> Plan:
        """Reconcile until nothing changes; fails if it never ends."""
        for _ in range(most):
            plan = self.reconcile(name)
            if plan.is_idle and decide(self.observed(name), self.settings).status == plan.status:
                return plan
        raise AssertionError(f"still not idle: {plan}")

    def carry_out(self, plan: Plan, name: str) -> None:
        self._share(plan)
        for document in plan.create:
            if not (_is_shared(document) or self._is_refused(document)):
                self._create(document)
        for document in plan.apply:
            if not (_is_shared(document) or self._is_refused(document)):
                self._apply(document)
        for adoption in plan.adopt:
            metadata = self.objects[adoption.kind, adoption.name]["metadata"]
            if adoption.resource_version not in (None, metadata["resourceVersion"]):
                continue
            metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
            others = [ref for ref in metadata["ownerReferences"] if ref["uid"] != adoption.owner["uid"]]
            metadata["ownerReferences"] = others if "$patch" in adoption.owner else [*others, adoption.owner]
        for mark in plan.annotate:
            self.pods[mark.pod]["metadata"].setdefault("annotations", {}).update(mark.annotations)
        for delete in (delete for delete in plan.delete if not delete.namespace):
            present = self.objects.get((delete.kind, delete.name), {}).get("metadata", {})
            version = delete.resource_version
            if present.get("uid") == delete.uid and version in (None, present["resourceVersion"]):
                del self.objects[delete.kind, delete.name]
                self.job_pods.pop(delete.name, None)
        self.services[name]["status"] = plan.status.wire()

    def patch(self, name: str = "chat", **spec: Any) -> None:
        service = self.services[name]
        service["spec"] = {**service["spec"], **spec}
        service["metadata"]["generation"] += 1

    def change(self, name: str = "chat", **spec: Any) -> Plan:
        """The user patches the spec, and the operator reconciles until nothing changes."""
        self.patch(name, **spec)
        return self.settle(name)

    # --- what the cluster does ---

    def refuse(self, which: Callable[[Object], bool], message: str) -> None:
        """The API server refuses these documents from now on."""
        self._refusals.append((which, message))

    def accept(self) -> None:
        """It refuses nothing any more, and what was refused is due to be tried again."""
        self._refusals, self.refusals = [], ()

    def roll_out(self, name: str = "chat", *, ready: bool = True) -> None:
        """The Deployment controller, the scheduler and the kubelet, all the way."""
        deployment = self.objects[DEPLOYMENT, name]
        template, count = deployment["spec"]["template"], deployment["spec"]["replicas"]
        revision = template["metadata"]["labels"][REVISION_LABEL]
        for pod in [p for p in self.pods.values() if _label(p, SERVICE_LABEL) == name]:
            del self.pods[pod["metadata"]["name"]]
        self._add_replica_set(template)
        self.scale_replica_sets({revision: count}, name)
        for index in range(count):
            self.add_pod(f"{name}-{revision}-{index}", template, ready=ready)
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": count,
            "updatedReplicas": count,
            "availableReplicas": count if ready else 0,
            "conditions": [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]
            if ready
            else [],
        }

    def add_pod(self, pod_name: str, template: Object, *, ready: bool = True, node: str | None = "") -> Object:
        nodes = self.nodes or (CPU_NODE,)
        pod = {
            "metadata": {**copied(template["metadata"]), "name": pod_name, "uid": f"uid-{pod_name}"},
            "spec": {**copied(template["spec"]), "nodeName": nodes[0].name if node == "" else node},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                "containerStatuses": [{"name": "runtime", "restartCount": 0, "image": "x", "started": ready}],
            },
        }
        pod["metadata"]["creationTimestamp"] = rfc3339(self.now)
        self._add_replica_set(template)
        self.pods[pod_name] = pod
        return pod

    def _add_replica_set(self, template: Object) -> None:
        """ReplicaSets with the Deployment's annotations and hold, as its controller creates them."""
        name, revision = _label(template, SERVICE_LABEL), _label(template, REVISION_LABEL)
        deployment = self.objects.get((DEPLOYMENT, name), {"metadata": {}, "spec": {}})
        current = "template" in deployment["spec"] and self.revision(name) == revision
        metadata = {
            **template["metadata"],
            "annotations": deployment["metadata"]["annotations"] if current else {},
            "ownerReferences": [{"uid": deployment["metadata"].get("uid", ""), "controller": True}],
        }
        spec = {"replicas": 1, "minReadySeconds": deployment["spec"].get("minReadySeconds", 0)}
        made = copied({"metadata": metadata, "spec": spec})
        self.replica_sets.setdefault(f"{name}-{revision}", made)

    def scale_replica_sets(self, replicas: dict[str, int], name: str = "chat") -> None:
        """The Deployment's controller: revision -> pods, of the others none; the newest has the Deployment's hold."""
        for document in self.replica_sets.values():
            revision = _label(document, REVISION_LABEL)
            if _label(document, SERVICE_LABEL) == name:
                document["spec"]["replicas"] = replicas.get(revision, 0)
            if _label(document, SERVICE_LABEL) == name and revision == self.revision(name):
                document["spec"]["minReadySeconds"] = self.deployment(name)["spec"].get("minReadySeconds", 0)

    def _drafters_of(self, pod: Object) -> list[DrafterReport]:
        """All of its revision's, loaded."""
        name, revision = _label(pod, SERVICE_LABEL), _label(pod, REVISION_LABEL)
        pool = boot_of(self.objects[CONFIG_MAP, f"{name}-{revision}"])["draftPool"]
        return [DrafterReport(name=drafter["name"], loaded=True) for drafter in pool]

    def report_states(self, name: str = "chat", **fields: Any) -> None:
        """Each pod answers with the mounted hot config in force, and all drafters loaded if `fields` has none."""
        hot = HotConfig.model_validate_json(self.objects[CONFIG_MAP, f"{name}-hot"]["data"]["config.json"])
        for pod_name, pod in self.pods.items():
            if _label(pod, SERVICE_LABEL) == name:
                self.states[pod_name] = RuntimeState(
                    service=name,
                    namespace="default",
                    revision=_label(pod, REVISION_LABEL),
                    config_hash=config_hash(hot),
                    started_at=START,
                    reported_at=self.now,
                    ready=True,
                    plugin_active=True,
                    **({"drafters": self._drafters_of(pod)} | fields),
                )

    def report(self, name: str = "chat", **fields: Any) -> Plan:
        """The pods report, and the operator reconciles until nothing changes."""
        self.report_states(name, **fields)
        return self.settle(name)

    def replace_pods(self, **fields: Any) -> Plan:
        """The Deployment's controller rolls out, and the operator reconciles until nothing changes."""
        self.roll_out(**fields)
        return self.settle()

    def profile(self, job_name: str, **fields: Any) -> Plan:
        """The Job measures, and the operator reconciles until nothing changes."""
        self.measure(job_name, **fields)
        return self.settle()

    def finish_job(self, job_name: str, message: str, *, exit_code: int = 0, reason: str = "Completed") -> None:
        """The Job's pod ends with `message` as its termination message."""
        job = self.objects[JOB, job_name]
        end = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": rfc3339(self.now)}
        ended = {"terminated": end}
        (container,) = job["spec"]["template"]["spec"]["containers"]
        self.job_pods[job_name] = {
            "metadata": {"name": f"{job_name}-x", "labels": {"batch.kubernetes.io/job-name": job_name}},
            "status": {
                "phase": "Failed" if exit_code else "Succeeded",
                "containerStatuses": [{"name": container["name"], "state": ended}],
            },
        }
        kind = "Failed" if exit_code else "Complete"
        job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": rfc3339(self.now)}]}

    def join_sidecar(self, job_name: str) -> None:
        """The mesh put an ordinary container into the Job's pod. It runs on, so neither pod nor Job ever ends."""
        self.objects[JOB, job_name]["status"] = {"active": 1}
        status = self.job_pods[job_name]["status"]
        status["phase"] = "Running"
        status["containerStatuses"].append({"name": "istio-proxy", "state": {"running": {}}})

    def measure(self, job_name: str, *, failing: dict[str, str] | None = None, **target: Any) -> None:
        """Finish the Job with a profile of all that it was to measure. failing: drafter -> why it was not measured."""
        request = request_of(self.objects[JOB, job_name])
        assert request is not None
        self.finish_job(
            job_name, result(request, rfc3339(self.now), failing=failing, **target).model_dump_json(by_alias=True)
        )

    def download(self, name: str = "chat") -> None:
        """The Job that downloads models, if there is one, is done."""
        for job in self._jobs(PREFETCH):
            if _label(job, SERVICE_LABEL) == name:
                self.finish_job(job["metadata"]["name"], "")
        self.settle(name)

    def settled(self) -> Self:
        self.settle()
        return self

    def served(self) -> Self:
        self.serve()
        return self

    def serve(self, name: str = "chat") -> Plan:
        """Settle a new service until it is measured, rolled out and answers. Decisions depend only on what is observed,
        so the same start, which hundreds of tests share, is carried through once."""
        if self._refusals:
            return self._serve(name)
        start = pickle.dumps((type(self), name, vars(self)))
        if start not in _SERVED:
            plan = self._serve(name)
            _SERVED[start] = pickle.dumps((vars(self), plan))
        state, last_plan = pickle.loads(_SERVED[start])
        vars(self).update(state)
        return cast(Plan, last_plan)

    def _serve(self, name: str) -> Plan:
        self.settle(name)
        self.download(name)
        self.roll_out(name)
        self.reconcile(name)
        for job in list(self.jobs()):
            self.measure(job)
        self.settle(name)
        self.report_states(name)
        return self.settle(name)

    # --- what a user sees ---

    def jobs(self) -> list[str]:
        """Names of the Jobs that measure."""
        return [job["metadata"]["name"] for job in self._jobs(PROFILING)]

    def condition(self, kind: ConditionType, name: str = "chat") -> Condition:
        condition = find_condition(self.observed(name).status.conditions, kind)
        assert condition is not None, f"{kind} is not set"
        return condition

    def reason(self, kind: ConditionType, name: str = "chat") -> str:
        condition = self.condition(kind, name)
        return f"{condition.status}/{condition.reason}"

    def deployment(self, name: str = "chat") -> Object:
        return self.objects[DEPLOYMENT, name]

    def revision(self, name: str = "chat") -> str:
        return _label(self.deployment(name)["spec"]["template"], REVISION_LABEL)

    # --- the API server ---

    def _is_refused(self, document: Object) -> bool:
        said = next((message for which, message in self._refusals if which(document)), None)
        if said is not None:
            name = document["metadata"]["name"]
            refused = ApiRefusal(document["kind"], name, component_of(document), said, fingerprint(document))
            self.refusals = (*self.refusals, refused)
        return said is not None

    def _share(self, plan: Plan) -> None:
        """Writes in the operator's namespace."""
        for document in filter(_is_shared, (*plan.create, *plan.apply)):
            assert document["metadata"]["namespace"] == self.settings.namespace
            name = profile_shared_as(document["metadata"]["name"])
            made = {"uid": self._next_uid(), "resourceVersion": "1", "creationTimestamp": rfc3339(self.now)}
            self.shared[name] = {**copied(document), "metadata": made | document["metadata"]}
        for delete in (delete for delete in plan.delete if delete.namespace):
            assert delete.namespace == self.settings.namespace
            del self.shared[profile_shared_as(delete.name)]

    def _next_uid(self) -> str:
        self._number += 1
        return f"uid-{self._number}"

    def _create(self, document: Object) -> None:
        key = (document["kind"], document["metadata"]["name"])
        if key in self.objects:
            return
        self.objects[key] = copied(document)
        made = {"uid": self._next_uid(), "resourceVersion": "1", "generation": 1}
        self.objects[key]["metadata"] |= {**made, "creationTimestamp": rfc3339(self.now)}
        if key[0] == JOB and (request := request_of(document)) is not None:
            self.created_jobs.append(request)

    def _apply(self, document: Object) -> None:
        present = self.objects[document["kind"], document["metadata"]["name"]]
        version = document["metadata"].get("resourceVersion")
        assert version in (None, present["metadata"]["resourceVersion"]), "Conflict"
        assert document["metadata"]["uid"] == present["metadata"]["uid"], "applied to another object"
        assert not present.get("immutable") or present["data"] == document["data"], "Invalid: immutable"
        before = copied({k: v for k, v in present.items() if k != "metadata"})
        kept = {k: present["metadata"][k] for k in ("uid", "generation", "resourceVersion", "creationTimestamp")}
        present.update(copied(document))
        present["metadata"] |= kept
        present["metadata"]["resourceVersion"] = str(int(kept["resourceVersion"]) + 1)
        if {k: v for k, v in present.items() if k != "metadata"} != before:
            present["metadata"]["generation"] += 1


def result(
    request: MeasurementRequest, at: str, *, failing: dict[str, str] | None = None, **target: Any
) -> profile.ProfilingResult:
    failing = failing or {}
    drafters = [
        profile.DrafterProfile(
            key=request.keys.drafters[name],
            name=name,
            cost=profile.ProfileStepCost(constant_s=0.001),
            autoregressive=False,
            error_percent=3.0,
            measured_at=at,
        )
        for name in request.drafters
        if name not in failing
    ]
    return profile.ProfilingResult(
        target=target_profile(request.keys.target, request.keys.product, at, **target) if request.target else None,
        drafters=drafters,
        failures=[profile.ProfilingFailure(reason=r, message=f"{r} happened", drafter=n) for n, r in failing.items()],
    )


def target_profile(key: str, product: str, at: str, **fields: Any) -> profile.TargetProfile:
    costs = {profile.ProfileExecutionMode.UNIFORM: profile.ProfileStepCost(per_batched_token_s=0.001, constant_s=0.02)}
    values: dict[str, Any] = {"error_percent": 4.0, "costs": costs, **fields}
    return profile.TargetProfile(key=key, model="org/target", product=product, measured_at=at, **values)


def boot_of(document: Object) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(document["data"]["config.json"])
    return loaded


def boot_configs_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the text of each boot config that is parsed from now on."""
    reads: list[str] = []
    read = BootConfig.read

    def noting(document: str) -> BootConfig:
        reads.append(document)
        return read(document)

    monkeypatch.setattr(BootConfig, "read", noting)
    return reads


def find(plan: Plan, kind: str, where: Callable[[Object], bool] = lambda _: True) -> list[Object]:
    return [d for d in (*plan.create, *plan.apply) if d["kind"] == kind and where(d)]


def _is_shared(document: Object) -> bool:
    return _label(document, COMPONENT_LABEL) == SHARED_PROFILE


def _label(document: Object, name: str) -> str:
    return str(document["metadata"].get("labels", {}).get(name, ""))


def started(*, nodes: tuple[Node, ...] | None = (CPU_NODE,), **spec: Any) -> World:
    """A service whose pods run and whose Job does."""
    world = World(manifest(**spec), nodes=nodes).settled()
    world.roll_out()
    world.settle()
    return world


def unschedulable(world: World, name: str, since: float) -> dict[str, Any]:
    pod = world.add_pod(name, world.deployment()["spec"]["template"], ready=False, node=None)
    pod["status"] = {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available: insufficient nvidia.com/gpu.",
                "lastTransitionTime": rfc3339(since),
            }
        ],
    }
    return pod
