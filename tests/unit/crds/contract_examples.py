"""One full example of each document that crosses releases, as this release writes it."""

from __future__ import annotations

import json
from typing import Any

from outrider_crds import profile
from outrider_crds.counters import TPOT_BUCKETS_S, TTFT_BUCKETS_S, HistogramState, SpeedupCounters
from outrider_crds.runtime_config import boot_config, hot_config
from outrider_crds.runtime_state import (
    ChoiceState,
    DrafterMemory,
    DrafterReport,
    ProfileSource,
    ProfileState,
    RuntimeState,
    SLOClassState,
    Verification,
)
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_operator.decide.desired.profile_store import Failure, Store, store_data

_AT = "2026-11-21T12:00:00Z"
_SPEC = SpeculativeServiceSpec.model_validate(
    {
        "target": {"name": "org/target", "revision": "abc", "source": {"hub": {"tokenSecretRef": {"name": "hub"}}}},
        "draftPool": [
            {"name": "lookup", "method": "PromptLookup", "promptLookup": {"minTokens": 2, "maxTokens": 4}},
            {"name": "window", "method": "SparseSelf", "sparseSelf": {}},
            {
                "name": "eagle",
                "method": "Eagle",
                "eagle": {"model": {"name": "org/eagle", "source": {"pvc": {"claimName": "heads", "path": "eagle"}}}},
            },
        ],
        "accelerator": {
            "products": ["NVIDIA-H200"],
            "count": 2,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "serving"},
        },
        "sloClasses": [{"name": "chat", "tpot": "50ms", "ttft": "2s"}, {"name": "batch", "tpot": "500ms"}],
        "engine": {
            "tensorParallelSize": 2,
            "maxModelLen": 8192,
            "extraArgs": ["--max-num-seqs=64"],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        },
    }
)


def state() -> RuntimeState:
    tpot = HistogramState(counts=[1] * (len(TPOT_BUCKETS_S) + 1), sum_s=1.5)
    ttft = HistogramState(counts=[1] * (len(TTFT_BUCKETS_S) + 1), sum_s=2.5)
    return RuntimeState(
        service="chat", namespace="demo", revision="r1", config_hash="0123456789", config_error="no", started_at=1.5,
        reported_at=2.5, ready=True, plugin_active=True, product="NVIDIA-H200", device="NVIDIA H200",
        engine_version="0.32.0", verification=Verification.UNIFORM,
        profile=ProfileState(
            source=ProfileSource.MOUNTED, target_key="t", error_percent=2.5, mismatch="none", load_error="none"
        ),
        choice=ChoiceState(drafter="eagle", draft_tokens=2.5, reason="Pays", has_disabled_drafts=True, running=3),
        steps=10, speculative_steps=5, output_tokens=100, busy_s=9.5, proposed_tokens=50,
        batch_squared=14, batch_accepted=9, batch_busy_s=2.5, prompt_busy_s=0.75,
        draft_length_steps=[5, 3, 2], dropped_steps=1, loop_failures=1, decision_s=0.5, caught_up_tokens=7,
        catch_up_s=0.25,
        drafters=[
            DrafterReport(
                name="eagle", loaded=True, reason="no", request_steps=5, tried=9, verified=10, accepted=7,
                memory=DrafterMemory(weight_bytes=10, kv_bytes_per_token=2, concurrency_percent=1.5),
            )
        ],
        slo_classes=[
            SLOClassState(name="chat", finished=28, attained=20, aborted=3, output_tokens=100, tpot=tpot, ttft=ttft)
        ],
        speedup=SpeedupCounters(
            probes=1, baseline_tokens=10, baseline_s=1.5, speculative_tokens=20, speculative_s=1.5
        ),
    )  # fmt: skip


def target_profile() -> profile.TargetProfile:
    cost = profile.ProfileStepCost(
        per_context_token_s=1e-9,
        per_batched_token_s=1e-6,
        per_batched_token_above_knee_s=1e-5,
        knee_tokens=256,
        per_request_s=1e-6,
        per_context_query_s=1e-7,
        per_logits_token_s=1e-6,
        constant_s=0.005,
    )
    return profile.TargetProfile(
        key="t", model="org/target", product="NVIDIA-H200", device="NVIDIA H200", engine_version="0.32.0",
        commit="abc", costs=dict.fromkeys(profile.ProfileExecutionMode, cost), error_percent=2.5, spread_percent=0.5,
        measured_at=_AT,
    )  # fmt: skip


def drafter_profile() -> profile.DrafterProfile:
    cost = profile.ProfileStepCost(constant_s=0.001)
    return profile.DrafterProfile(
        key="d", name="eagle", cost=cost, autoregressive=True, first_pass=cost, error_percent=1.5, commit="def",
        measured_at=_AT,
    )  # fmt: skip


def documents() -> dict[str, Any]:
    """Name of the frozen file -> what this release writes."""
    failure = profile.ProfilingFailure(reason="DrafterFailed", message="it does not load", drafter="window")
    result = profile.ProfilingResult(target=target_profile(), drafters=[drafter_profile()], failures=[failure])
    boot = boot_config(_SPEC, service="chat", namespace="demo", revision="r1", image="outrider/runtime:0.1.0",
                       max_draft_tokens=5)  # fmt: skip
    store = Store().with_target(target_profile()).with_drafter(drafter_profile())
    stored = store.with_failure("s", "attempt", Failure(reason="DrafterFailed", message="it does not load", job="uid"))
    return {
        "state": state().wire(),
        "boot-config": boot.wire(),
        "hot-config": hot_config(_SPEC).wire(),
        "profiling-result": result.wire(),
        "profile-config-map": {name: json.loads(text) for name, text in store_data(stored).items()},
    }
