"""Every row of the conditions' table, on real services with a real scheduler, kubelet and Deployment controller.

All services are made at once, so that their waiting overlaps; each test then waits for its own row.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType
from outrider_operator.kinds import DEPLOYMENT, JOB, POD

from tests.cluster.cluster import Cluster
from tests.operator.claims import HUB_TARGET, Claim
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import EAGLE, LOOKUP, on_gpu

pytestmark = pytest.mark.cluster

Expected = tuple[str, str, str, str]
"""(condition, status, reason, words of its sentence)"""


@dataclass(frozen=True)
class Row:
    standin: Mapping[str, object] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    expected: tuple[Expected, ...] = ()
    profiled: bool = False
    """Most rows are not about profiles, and do without the Job."""

    def whole_spec(self) -> dict[str, Any]:
        return self.spec if self.profiled else {"profiling": {"mode": "Skip"}, **self.spec}


TRAFFIC = {"tokens_per_s": 100}
ROWS = {
    "good": Row(
        TRAFFIC,
        expected=(
            ("SpecValid", "True", "Accepted", ""),
            ("ProfilesReady", "True", "Profiled", "measured on cpu"),
            ("Available", "True", "EnoughReadyPods", "1 of 1"),
            ("Updated", "True", "UpToDate", "current config"),
            ("Progressing", "False", "Complete", ""),
            ("Ready", "True", "EndpointReady", ""),
            ("SpeculationActive", "True", "Pays", "speed-up is 1.5x"),
            ("GoodputHealthy", "True", "AsPredicted", "speed-up is 1.5x"),
            ("SLOAttained", "True", "Attained", "chat 100% (objective 90%)"),
        ),
        profiled=True,
    ),
    "loses": Row(
        {**TRAFFIC, "speedup": 0.8, "attained_percent": 20, "reckless": 1},
        expected=(
            ("SpeculationActive", "False", "MeasuredSlower", "speed-up is 0.8x"),
            ("GoodputHealthy", "False", "BelowBaseline", 'speculation.mode: "Off"'),
            ("SLOAttained", "False", "Missed", "% (objective 90%); batch "),
            ("Ready", "True", "EndpointReady", ""),
        ),
    ),
    "declines": Row(
        {**TRAFFIC, "speedup": 0.8},
        expected=(
            ("SpeculationActive", "False", "NotWorthIt", "Plain decoding is faster"),
            ("GoodputHealthy", "True", "AsPredicted", ""),
        ),
    ),
    "idle": Row(
        expected=(
            ("SpeculationActive", "Unknown", "NoTraffic", "Fewer than"),
            ("GoodputHealthy", "Unknown", "NoTraffic", ""),
            ("SLOAttained", "Unknown", "NoTraffic", ""),
        ),
    ),
    "off": Row(
        TRAFFIC,
        {"speculation": {"mode": "Off"}, "sloClasses": []},
        (
            ("SpeculationActive", "False", "Off", "mode is Off"),
            ("SLOAttained", "Unknown", "NoSLOClasses", "sloClasses"),
        ),
    ),
    "no-drafter": Row(
        spec={"draftPool": []}, expected=(("SpeculationActive", "False", "NoDrafter", "draftPool is empty"),)
    ),
    "unloadable": Row(
        {**TRAFFIC, "unloadable": "eagle"},
        {"draftPool": [EAGLE]},
        (
            ("SpeculationActive", "False", "NoDrafter", "its weights do not fit the target"),
            ("Updated", "False", "DrafterNotLoaded", "its weights do not fit the target"),
            ("Ready", "True", "EndpointReady", ""),
        ),
    ),
    "to-zero": Row(
        spec={"replicas": 0},
        expected=(
            ("Available", "True", "ScaledToZero", ""),
            ("Ready", "False", "ScaledToZero", "replicas is 0"),
            ("Updated", "True", "UpToDate", ""),
        ),
    ),
    "crashes": Row(
        {"crash": 1},
        expected=(
            ("Ready", "False", "PodCrashing", "no such weights"),
            ("Available", "False", "PodCrashing", ""),
            ("Progressing", "False", "Stalled", ""),
        ),
    ),
    "never-ready": Row(
        {"start_s": -1},
        {"rollout": {"progressDeadline": "20s", "drainTimeout": "1s"}},
        (
            ("Available", "False", "", "0 of 1 pods are ready"),
            ("Progressing", "False", "Stalled", ""),
        ),
    ),
    "no-image": Row(
        spec={"podTemplate": {"image": "outrider.local/nowhere:1"}},
        expected=(
            ("Ready", "False", "ImagePullFailed", "outrider.local/nowhere:1"),
            ("Progressing", "False", "Stalled", "outrider.local/nowhere:1"),
        ),
    ),
    "no-model": Row(
        spec={"target": {"name": "tests/no-model", "source": {"hostPath": {"path": "/srv/nowhere"}}}},
        expected=(
            ("Ready", "False", "PodCannotStart", "/srv/nowhere"),
            ("Progressing", "False", "Stalled", "/srv/nowhere"),
            ("ProfilesReady", "False", "Profiling", " waits: "),
        ),
        profiled=True,
    ),
    "secretless": Row(  # it was PodCrashing, and no container had ever run
        spec={
            "podTemplate": {
                "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "token"}}}]
            }
        },
        expected=(("Ready", "False", "PodCannotStart", "nowhere"),),
    ),
    "evicted": Row({"fill_bytes": 1_000_000, "start_s": -1}, {"modelCache": {"emptyDir": {"sizeLimit": "1Ki"}}}),
    "no-node": Row(
        spec=on_gpu(["NVIDIA-GB300"]),
        expected=(
            ("ProfilesReady", "False", "NoMatchingNode", "nvidia.com/gpu.product=NVIDIA-GB300"),
            ("Progressing", "False", "NoCapacity", "has no node"),
        ),
        profiled=True,
    ),
    "paused": Row(
        spec={"paused": True},
        expected=(("Progressing", "False", "Paused", "spec.paused"), ("ProfilesReady", "False", "Learning", "paused")),
        profiled=True,
    ),
    "skips": Row(
        spec={"profiling": {"mode": "Skip"}},
        expected=(("ProfilesReady", "False", "Learning", "mode is Skip"), ("Updated", "True", "UpToDate", "")),
    ),
    "noisy": Row(
        {"spread_percent": 60}, expected=(("ProfilesReady", "False", "Noisy", "spread is 60%"),), profiled=True
    ),
    "vocabulary": Row(
        {"profile": "vocabulary"},
        {"draftPool": [LOOKUP, EAGLE]},
        (("ProfilesReady", "False", "VocabularyMismatch", "target's family"), ("Updated", "True", "UpToDate", "")),
        profiled=True,
    ),
    "job-dies": Row(
        {"profile": "die"},
        expected=(
            ("ProfilesReady", "False", "Failed", "CUDA error: out of memory"),
            ("Updated", "True", "UpToDate", ""),
        ),
        profiled=True,
    ),
    "job-hangs": Row(
        {"profile": "hang"},
        {"profiling": {"timeout": "12s", "timeBudget": "5s"}},
        (("ProfilesReady", "False", "Failed", "profiling.timeout"), ("Updated", "True", "UpToDate", "")),
        profiled=True,
    ),
    "job-raves": Row(
        {"profile": "nonsense"},
        expected=(("ProfilesReady", "False", "Failed", ""), ("Updated", "True", "UpToDate", "")),
        profiled=True,
    ),
    "job-lies": Row(
        {"profile": "absurd"},
        expected=(("ProfilesReady", "False", "Failed", ""), ("Updated", "True", "UpToDate", "")),
        profiled=True,
    ),
    "infeasible": Row(
        {**TRAFFIC, "attained_percent": 10},
        {"sloClasses": [{"name": "chat", "tpot": "1ms"}]},
        (("SLOAttained", "False", "Infeasible", "best that this hardware reaches"),),
        profiled=True,
    ),
    "no-prometheus": Row(
        spec={"metrics": {"source": "Prometheus"}},
        expected=(("SpecValid", "False", "PrometheusNotConfigured", "prometheus.url"),),
    ),
    "whole-node": Row(
        spec={"podTemplate": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}},
        expected=(("SpecValid", "False", "HostPathForbidden", "names / of the node"),),
    ),
    "refused": Row(
        spec={"podTemplate": {"labels": {"team": "unknown"}}},
        expected=(("SpecValid", "False", "ChildRejected", "no such team"),),
    ),
    "waits": Row(
        {"profile": "die"},
        {"profiling": {"mode": "Required"}},
        (
            ("Updated", "False", "WaitingForProfile", "profiling.mode"),
            ("Progressing", "False", "WaitingForProfile", ""),
            ("Ready", "False", "NoReadyEndpoint", ""),
        ),
        profiled=True,
    ),
}


@pytest.fixture(scope="module")
def policy(cluster: Cluster, namespace: str) -> Generator[None, None, None]:
    """A cluster's own policy: what admission of the service cannot know of a Deployment."""
    team = "object.spec.template.metadata.?labels['team']"
    deployments = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": namespace}}
    cluster.apply(
        {
            **api,
            "kind": "ValidatingAdmissionPolicy",
            "spec": {
                "matchConstraints": {"resourceRules": [deployments]},
                "validations": [{"expression": f"{team}.orValue('') != 'unknown'", "message": "no such team"}],
            },
        },
        {
            **api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "spec": {"policyName": namespace, "validationActions": ["Deny"], "matchResources": selector},
        },
    )
    probe = _deployment({"app": "probe", "team": "unknown"})

    def refuses() -> bool:
        tried = cluster.try_kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=json.dumps(probe))
        return "no such team" in tried.stderr

    cluster.wait_until("the policy holds", refuses, 60)
    yield
    cluster.kubectl("delete", "validatingadmissionpolicies,validatingadmissionpolicybindings", namespace)


def _deployment(labels: dict[str, str]) -> dict[str, Any]:
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "probe"},
        "spec": {"selector": {"matchLabels": {"app": "probe"}}, "template": pod},
    }


@pytest.fixture(scope="module")
def services(
    make: Make, cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory, policy: None
) -> dict[str, Service]:
    """One for each row, and one whose model the hub refuses."""
    del policy
    claim = Claim(cluster, namespace, tmp_path_factory.mktemp("claim") / "volume", "weights")
    refused = Row({"prefetch": "refuse"}, {**claim.field, **HUB_TARGET})
    rows = {"gated": refused, **ROWS}  # what takes longest first
    return {name: make(name, standin=row.standin, **row.whole_spec()) for name, row in rows.items()}


@pytest.mark.parametrize(("name", "expected"), [(n, e) for n, row in ROWS.items() for e in row.expected])
def test_condition_says_what_is_the_case(services: dict[str, Service], name: str, expected: Expected) -> None:
    """A row of the table: status, reason, and a sentence that says what to do."""
    kind, status, reason, words = expected
    services[name].wait(kind, status, reason or None, words)


@pytest.mark.parametrize("name", ROWS)
def test_every_condition_is_there_from_first_sight(services: dict[str, Service], name: str) -> None:
    """No condition is ever absent, and each says which generation it speaks of."""
    document = services[name].read()
    conditions = document["status"]["conditions"]
    assert sorted(entry["type"] for entry in conditions) == sorted(ConditionType)
    assert {entry["observedGeneration"] for entry in conditions} == {document["metadata"]["generation"]}


def test_printer_columns_show_the_figures(services: dict[str, Service], cluster: Cluster) -> None:
    """`kubectl get specsvc` is the first thing that a user looks at."""
    service = services["good"]
    service.wait("SLOAttained", "True")

    def table() -> list[str]:
        return cluster.kubectl("get", "specsvc", "good", "-n", service.namespace).splitlines()

    wait_for("the speed-up", lambda: "1.5" in table()[1])  # idle while a busy machine keeps the pod from answering
    header, line = table()
    assert header.split() == [
        "NAME", "TARGET", "ACCELERATOR", "READY", "REPLICAS", "GOODPUT", "SPEEDUP", "ACCEPTANCE", "SLO",
        "ROLLOUT", "AGE",
    ]  # fmt: skip
    assert "True" in line
    assert "tok/s" in line


def test_a_job_that_failed_is_not_run_again(services: dict[str, Service], client: Client) -> None:
    """A failed key runs again only on a changed spec or the annotation."""
    service = services["job-dies"]
    service.wait("ProfilesReady", "False", "Failed")
    own = [job for job in client.list(JOB, service.namespace) if _owned_by(job, service)]
    assert own == []
    service.wait("Ready", "True")
    # It is made once, and notes the ready revision in an annotation, which counts as a generation too.
    assert service.child(DEPLOYMENT)["metadata"]["generation"] <= 2


def test_what_went_wrong_is_an_event_on_the_service(services: dict[str, Service], cluster: Cluster) -> None:
    """`kubectl describe` shows reason and sentence, once each."""
    service = services["no-image"]
    service.wait("Ready", "False", "ImagePullFailed")

    def posted() -> list[dict[str, Any]]:
        events = cluster.get("events", namespace=service.namespace)
        return [
            e for e in events if e["involvedObject"]["name"] == "no-image" and e["reason"] == "ReadyImagePullFailed"
        ]

    warnings = wait_for("the event", posted)
    assert {event["source"]["component"] for event in warnings} == {"outrider"}
    assert len({event["message"] for event in warnings}) == len(warnings)


def test_the_unloadable_draft_is_named_in_the_status(services: dict[str, Service]) -> None:
    """The pod serves on without it, and the status says which draft and why."""
    service = services["unloadable"]

    def look() -> Any:
        return [d for d in service.read()["status"].get("drafts", []) if not d["loaded"] and d["reason"]]

    assert "its weights do not fit the target" in wait_for("the draft's reason", look)[0]["reason"]


def test_a_service_that_waits_for_its_profile_has_no_pod(services: dict[str, Service]) -> None:
    """profiling.mode: Required makes no revision before the profile is there."""
    service = services["waits"]
    service.wait("ProfilesReady", "False", "Failed")
    assert service.children(POD, "outrider.dev/component=serving") == []


def test_pods_evicted_in_a_row_say_why(services: dict[str, Service]) -> None:
    """A volume beyond its limit: 19 dead pods in 20 minutes, and no word of it."""
    service = services["evicted"]
    for kind, reason in (("Ready", "PodEnded"), ("Available", "PodEnded"), ("Progressing", "Stalled")):
        service.wait(kind, "False", reason)
        wait_for("the kubelet's words", partial(_says, service, kind, "exceeds the limit"))


def test_failed_download_shows_the_words_of_the_hub(services: dict[str, Service]) -> None:
    """A gated model: the kubelet's retries are over, and nothing waits for ever without a word."""
    service = services["gated"]
    service.wait("Progressing", "False", "Stalled", "cannot be had from the hub: 401")
    assert service.child(JOB, "gated-prefetch")["status"]["failed"] >= 1
    service.wait("Stalled", "True")


def _says(service: Service, kind: str, words: str) -> bool:
    return words in service.condition(kind)["message"]


def _owned_by(job: dict[str, Any], service: Service) -> bool:
    uid = service.read()["metadata"]["uid"]
    return any(owner["uid"] == uid for owner in job["metadata"].get("ownerReferences", []))
