"""Why a pod does not run, in words: its gates, its init containers and sidecars, its eviction."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionReason
from outrider_operator.cluster_model import Object
from outrider_operator.decide.pods.pod_states import pods_of
from outrider_operator.decide.pods.pod_troubles import how_it_ended

from tests.unit.operator.decide.world import START, rfc3339

RUNNING: Object = {"name": "runtime", "restartCount": 0, "started": True, "state": {"running": {}}}
NOT_YET: Object = {"name": "runtime", "state": {"waiting": {"reason": "PodInitializing"}}}
LAST_RUN: Object = {"startedAt": rfc3339(START - 50), "finishedAt": rfc3339(START - 20)}
ENDED: Object = {"exitCode": 7, "reason": "Error", "message": "starting\nno token", **LAST_RUN}
CRASH_LOOP: Object = {"waiting": {"reason": "CrashLoopBackOff"}}


def pod(*statuses: Object, init: tuple[Object, ...] = (), spec: Object | None = None, **status: Any) -> Object:
    metadata = {"name": "p", "creationTimestamp": rfc3339(START - 60)}
    status = {"phase": "Pending", "containerStatuses": statuses, "initContainerStatuses": init, **status}
    status = {name: list(value) if isinstance(value, tuple) else value for name, value in status.items()}
    return {"metadata": metadata, "spec": {"nodeName": "n", **(spec or {})}, "status": status}


def condition(kind: str, status: str, **fields: str) -> Object:
    return {"type": kind, "status": status, **fields}


@pytest.mark.parametrize(
    ("init", "statuses", "whose"),
    [
        ({"name": "warm", "restartCount": 1, "state": CRASH_LOOP}, [NOT_YET], "Init container warm of pod p"),
        ({"name": "mesh", "restartCount": 3, "state": CRASH_LOOP}, [RUNNING], "Init container mesh of pod p"),
        ({"name": "mesh", "restartCount": 3, "started": True, "state": {}}, [RUNNING], "Init container mesh of pod p"),
    ],
)
def test_init_container_that_keeps_ending_is_named(init: Object, statuses: list[Object], whose: str) -> None:
    """A failing init container was "Pod p is starting", and a native sidecar that ended was not seen at all."""
    made = pod(*statuses, init=({**init, "lastState": {"terminated": ENDED}},))
    trouble = pods_of(None, [made], {}, START).trouble()
    assert trouble is not None
    assert trouble == pods_of(None, [], {}, START, workers=[made]).trouble(), "the pods of a group, too"
    assert trouble.reason == ConditionReason.POD_CRASHING
    assert trouble.message == f"{whose} keeps ending with exit code 7 (Error); its last lines: starting | no token"


def test_sidecar_that_keeps_ending_is_named() -> None:
    made = pod(RUNNING, {"name": "log", "restartCount": 4, "state": CRASH_LOOP, "lastState": {"terminated": ENDED}})
    assert pods_of(None, [made], {}, START).why_not_ready().startswith("Container log of pod p keeps ending")


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            pod(
                spec={"nodeName": "", "schedulingGates": [{"name": "kueue"}, {"name": "quota"}]},
                conditions=[condition("PodScheduled", "False", reason="SchedulingGated", message="gated")],
            ),
            "Pod p waits for its scheduling gates to be removed: kueue, quota",
        ),
        (
            pod(
                RUNNING,
                phase="Running",
                conditions=[
                    condition("ContainersReady", "True"),
                    condition("Ready", "False", message='condition of pod readiness gate "lb" does not exist.'),
                ],
            ),
            'Pod p waits for its readiness gates: condition of pod readiness gate "lb" does not exist.',
        ),
        (
            pod(NOT_YET, init=({"name": "warm", "state": {"running": {}}},)),
            "Pod p waits for its init container warm",
        ),
        (
            pod(NOT_YET, init=({"name": "warm", "state": {"terminated": ENDED}},)),
            "Init container warm of pod p ended with exit code 7 (Error); its last lines: starting | no token",
        ),
        (pod(NOT_YET, init=({"name": "mesh", "started": True, "state": {"running": {}}},)), "Pod p is starting"),
    ],
    ids=["scheduling gates", "readiness gate", "init container", "failed init container", "started sidecar"],
)
def test_pod_that_waits_says_for_what(made: Object, sentence: str) -> None:
    """All of them were "Pod p is starting"."""
    assert pods_of(None, [made], {}, START).why_not_ready() == sentence


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            pod(
                {"name": "runtime", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
                conditions=[
                    condition("DisruptionTarget", "True", reason="TerminationByKubelet", message="low on storage.")
                ],
            ),
            "A pod ended for good (TerminationByKubelet): low on storage",
        ),
        (
            pod(
                {"name": "profiler", "state": {}},
                {"name": "log", "state": {"terminated": ENDED}},
                phase="Failed",
            ),
            "A pod ended for good (Error): container log: exit code 7 (Error); its last lines: starting | no token",
        ),
    ],
    ids=["evicted", "another container"],
)
def test_pod_that_ended_says_how(made: Object, sentence: str) -> None:
    """An evicted pod whose process ended with 0 was "A pod ended for good (Completed)."."""
    assert how_it_ended(made) == sentence
