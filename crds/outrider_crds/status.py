"""`SpeculativeService.status`: figures and states for people and programs (see also `conditions`, `rollout_status`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider_crds.base import MapList, Model
from outrider_crds.conditions import Condition
from outrider_crds.model_sources import MOST_ADAPTERS
from outrider_crds.rollout_status import RevisionStatus, RolloutStatus
from outrider_crds.texts import Message, Text


class Summary(Model):
    """Strings for the printer columns. One without a figure says why: idle, measuring, off, plain or unknown."""

    goodput: Text = ""
    """Tokens per second that reach users, over all pods."""
    speedup: Text = ""
    """Goodput / goodput of the same pods without speculation; "near 1x" until it differs significantly from 1. Before
    probes tell it, the speed-up that the pool's canary measured."""
    acceptance: Text = ""
    """Share of tried draft tokens that the target accepted."""
    slo: Text = ""
    """Attainment and name of the SLO class furthest below its objective."""


class GoodputStatus(Model):
    tokens_per_second: Text
    """Tokens that reached users, per second, summed over pods."""
    baseline_tokens_per_second: Text = ""
    """Tokens per second of the same pods without speculation, estimated by probes; empty while `speedup` is."""
    speedup: Text = ""
    """tokensPerSecond / baselineTokensPerSecond; empty until probes show that it differs significantly from 1."""
    speedup_range: Text = ""
    """95% confidence interval of `speedup`."""
    window: Text
    """Length of the window, as a duration."""
    tokens: int
    """Tokens that reached users in the window."""
    pods: Text
    """Pods that answered / ready pods, for example "2/3"."""


class SLOClassStatus(Model):
    name: Text
    """Name of the class in spec.sloClasses."""
    attainment_percent: Text = ""
    """Share of `requests` that met the class."""
    tpot_p50: Text = ""
    """Median time per output token after the first."""
    tpot_p99: Text = ""
    """99th percentile of the time per output token after the first."""
    requests: int = 0
    """Requests in the window that finished, or whose client disconnected after the SLO was missed."""
    aborted: int = 0
    """Requests in the window whose client disconnected."""


class DraftStatus(Model):
    name: Text
    """Name of the drafter in spec.draftPool."""
    kind: Text = ""
    """DFlash, DFlash2 or DSpark, as the checkpoint of method Block says; empty for other methods."""
    profiled: bool = False
    """True if its cost is measured on every product."""
    loaded: bool = False
    """True if every ready pod has loaded it."""
    reason: Text = ""
    """Reason why it is not loaded or not used, in a sentence."""
    acceptance_rate: Text = ""
    """Accepted / tried draft tokens in the window."""
    accepted_length: Text = ""
    """Mean tokens of a request per step with this drafter, including the bonus token."""
    share_percent: Text = ""
    """Share of (request, step) pairs in the window that used it."""
    memory: Text = ""
    """Memory on each device, whether it is used or not: weights, KV bytes per token, and the share of the KV cache (and
    so of concurrent requests) that it costs."""


class AdapterStatus(Model):
    name: Text
    """Name of the adapter in spec.adapters."""
    loaded: bool = False
    """True if requests may name it at every ready pod."""
    pods: Text = ""
    """Ready pods that have it loaded / ready pods, for example "2/3"."""
    reason: Text = ""
    """Reason why it, or its present source, could not be loaded, in a sentence."""
    acceptance_rate: Text = ""
    """Accepted / tried draft tokens of its requests in the window."""
    attainment_percent: Text = ""
    """Share of `requests` that met their SLO class."""
    requests: int = 0
    """Requests of it in the window that have a verdict, as in sloClasses."""


class BreakEven(Model):
    requests: int
    """Batch size: requests that decode at the same time."""
    context_tokens: int
    """Context length, in tokens, from which drafting pays; 0: at any length."""


class LongContextStatus(Model):
    """Gain of a SparseSelf drafter according to the profile, at an assumed acceptance rate of 80%."""

    drafter: Text
    """Name of the drafter in spec.draftPool."""
    break_even: Annotated[list[BreakEven], Field(max_length=8)] = []
    """Break-even context for each measured batch size at which drafting pays within the longest possible context."""
    inflection_tokens: int | None = None
    """Context, in tokens, from which a larger batch gains more (MagicDec's S_inflection); 0: at any; absent if there is
    none within the longest possible context."""


class ProfileStatus(Model):
    product: Text
    """One of spec.accelerator.products."""
    config_map: Text = ""
    """ConfigMap with the latency profile."""
    error_percent: Text = ""
    """Error of the latency model on shapes that it was not fitted to."""
    profiled_at: Text = ""
    """Time of the measurement."""
    long_contexts: Annotated[list[LongContextStatus], Field(max_length=8), MapList("drafter")] = []
    """Contexts at which each profiled SparseSelf drafter pays."""
    stale: bool = False
    """True if it is older than spec.profiling.maxAge, or does not fit the pods' device or engine."""
    failed_key: Text = ""
    """Profile key whose measurement failed. It is retried only for a changed spec or `outrider.dev/reprofile`."""
    message: Message = ""
    """Reason why the measurement failed, with the pod's last lines."""


class DemandStatus(Model):
    product: Text
    """One of spec.accelerator.products."""
    replicas: Text
    """Pods on this product that the load of the last window needs at the SLO."""
    requests: int
    """Requests that a pod can decode at the same time at the lowest `tpot` of the classes with traffic."""
    tokens_per_second: Text
    """Tokens per second of a pod with that many requests."""


class PrefetchStatus(Model):
    """The download of hub models into the claim of spec.modelCache."""

    claim_name: Text
    """The claim."""
    phase: Text
    """Waiting, Downloading, Complete or Failed."""
    models: Annotated[list[Text], Field(max_length=9)] = []
    """Models that are downloaded."""
    downloaded: Text = ""
    """What of them is on the claim, for example 12.3 GB; empty where the pod does not report."""
    total: Text = ""
    """What they take."""


class SpeculativeServiceStatus(Model):
    """What Outrider observed."""

    observed_generation: int = -1
    """metadata.generation for which this status was computed; -1 before the operator's first look."""
    nodes: int | None = None
    """Pods of one replica, if engine.nodes makes it a group; absent otherwise. The other fields then count the groups'
    leaders, which answer requests."""
    replicas: int = 0
    """Serving pods that exist."""
    ready_replicas: int = 0
    """Pods that answer: serving pods that are ready, those of a draft canary too."""
    updated_replicas: int = 0
    """Serving pods of the current revision."""
    ready_revision: Text = ""
    """Newest revision that had a ready pod. Raised deadlines do not restart its pods."""
    revision: RevisionStatus | None = None
    """The revision that pods should run, and how far its rollout is."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the serving pods, for autoscalers."""
    rollout: RolloutStatus | None = None
    """The draft canary in progress, or the last one."""
    prefetch: PrefetchStatus | None = None
    """The download of models into the claim; absent where modelCache names none or no model is from a hub."""
    accelerator: Annotated[str, Field(max_length=512)] = ""
    """spec.accelerator.products, for the printer column."""
    runtime_image: Text = ""
    """Release image of the runtime that the service runs on. A new operator does not change it by itself."""
    newer_runtime_image: Text = ""
    """Runtime image of the installed release, if the service runs an older one. The annotation
    outrider.dev/runtime-upgrade with this value, or its tag, starts a rollout to it."""
    conditions: Annotated[list[Condition], Field(max_length=16), MapList("type")] = []
    """Conditions, one of each type."""
    summary: Summary | None = None
    """Figures for the printer columns."""
    goodput: GoodputStatus | None = None
    """Goodput over the last window."""
    slo_classes: Annotated[list[SLOClassStatus], Field(max_length=8), MapList("name")] = []
    """Attainment and latency of each SLO class over the last window."""
    drafts: Annotated[list[DraftStatus], Field(max_length=8), MapList("name")] = []
    """State and figures of each drafter in the pool."""
    adapters: Annotated[list[AdapterStatus], Field(max_length=MOST_ADAPTERS), MapList("name")] = []
    """State of each LoRA adapter."""
    profiles: Annotated[list[ProfileStatus], Field(max_length=8), MapList("product")] = []
    """State of the latency profile of each product."""
    demand: Annotated[list[DemandStatus], Field(max_length=8), MapList("product")] = []
    """Replicas that the load needs on each product that can meet the SLO. Outrider itself does not scale."""
