"""The state that a pod returns at `GET /outrider/state` (admin port): versioned JSON with counters.

Counters grow from the start of the process, so a reader takes differences over its own window and sums them over pods.
`started_at` tells when a process is a new one. The Prometheus metrics come from the same document: each field names its
metric (see `metrics`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from outrider_crds.base import Model
from outrider_crds.contract import Contract
from outrider_crds.counter_sums import Counters
from outrider_crds.counters import (
    AdapterCounters,
    ArmCounters,
    DrafterCounters,
    HistogramState,
    SLOClassCounters,
    StepCounters,
)
from outrider_crds.metrics import Group, Labelled, Metric
from outrider_crds.texts import Message, Text

STATE_SCHEMA = 1


class ProfileSource(StrEnum):
    MOUNTED = "Mounted"
    """Coefficients of the mounted profile, corrected online."""
    LEARNING = "Learning"
    """Coefficients learned from this pod's own steps, since there is no usable profile."""


def _is_mounted(_profile: Any, source: ProfileSource) -> list[Labelled]:
    return [((), source == ProfileSource.MOUNTED)]


class ProfileState(Model):
    METRICS: ClassVar[Group] = Group("The latency profile")
    source: Annotated[ProfileSource, Metric("outrider_profile_mounted", series=_is_mounted)] = ProfileSource.LEARNING
    """1 while the coefficients come from a mounted profile (corrected online), 0 while they are learned from this pod's
    own steps."""
    target_key: Text = ""
    error_percent: Annotated[float | None, Metric("outrider_profile_error_percent")] = None
    """Held-out error of the profile in force, in percent. Absent while there is none."""
    mismatch: Annotated[Message, Metric("outrider_profile_mismatch")] = ""
    """Device, engine version or commit differ from those that the profile was measured on: 1 with a sentence in the
    state, 0 when they agree."""
    load_error: Annotated[Message, Metric("outrider_profile_load_error")] = ""
    """A mounted profile file cannot be read: 1 with a sentence in the state. The coefficients before it stay in
    force."""


class Verification(StrEnum):
    """Verification lengths at which the target runs fastest."""

    VARLEN = "Varlen"
    """Any lengths: CUDA graphs fit uniform and varlen steps, or there are no graphs (CPU)."""
    UNIFORM = "Uniform"
    """One length for all requests, in one full CUDA graph. A varlen step runs in pieces and costs more."""


class DrafterMemory(Model):
    """Memory of a drafter on each device, whether it is used or not."""

    weight_bytes: int
    """Bytes of its weights, without those that it shares with the target."""
    kv_bytes_per_token: int
    """Bytes of a cached token in its layers."""
    concurrency_percent: float
    """Share of the KV cache's tokens that the drafter costs."""


MEMORY_WORDS = (
    "the pool does not fit into memory",  # the plugin's, before it serves
    "memory ended while the target's graphs were captured",
    "out of memory",  # torch's, of a device
    "not enough memory",  # torch's, of a host
    "cannot allocate memory",  # Linux's
)
"""Parts of `DrafterReport.reason`, in lower case, that mean too little memory. The word may be part of a model name."""


class DrafterReport(DrafterCounters):
    name: Text
    kind: Text = ""
    """Name of the block drafter that its checkpoint is (DFlash, DFlash2, DSpark); empty for other methods."""
    loaded: Annotated[bool, Metric("outrider_drafter_loaded")]
    """1 while the drafter is loaded."""
    reason: Annotated[
        Message, Metric("outrider_drafter_info", labels=("reason",), series=lambda _drafter, reason: [((reason,), 1.0)])
    ] = ""
    """Always 1. Label `reason`: why the drafter is not loaded or is suspended, in a sentence; empty when it is in
    use."""
    memory: DrafterMemory | None = None
    """None for a drafter without a model, and before the engine has its memory."""


class SLOClassState(SLOClassCounters):
    name: Text


class AdapterState(AdapterCounters):
    name: Text
    loaded: Annotated[bool, Metric("outrider_adapter_loaded")] = False
    """1 while requests may name the adapter."""
    reason: Message = ""
    """Reason why it, or its present source, could not be loaded, in a sentence; empty while it is being loaded."""


class CanaryState(Model):
    """Both arms of the canary in force. Sums start from 0 with the process, and with another id."""

    METRICS: ClassVar[Group] = Group("Draft canary")
    id: Text
    """`CanaryConfig.id`."""
    stable: ArmCounters = ArmCounters()
    candidate: ArmCounters = ArmCounters()


REASONS = ("Pays", "NotWorthIt", "Off", "NoDrafter", "NoTraffic", "Measuring")


class ChoiceState(Model):
    """The controller's current choice, for people."""

    METRICS: ClassVar[Group] = Group("The present choice")
    drafter: Text = ""
    draft_tokens: Annotated[
        float,
        Metric(
            "outrider_chosen_draft_tokens", labels=("drafter",),
            series=lambda choice, tokens: [((choice.drafter,), tokens)],
        ),
    ] = 0.0  # fmt: skip
    """Mean draft length over the last steps' decoding requests. Label `drafter`: the drafter used most, empty when none
    was."""
    reason: Annotated[
        Text,
        Metric(
            "outrider_choice", labels=("reason",),
            series=lambda _choice, reason: [((name,), reason == name) for name in REASONS],
        ),
    ] = ""  # fmt: skip
    """1 for the reason of the present choice, 0 for the others. Label `reason`: `Pays`, `NotWorthIt` (no speculation is
    the right choice), `Off`, `NoDrafter`, `NoTraffic`, `Measuring`."""
    has_disabled_drafts: Annotated[bool, Metric("outrider_drafts_disabled")] = False
    """1 while a drafter is disabled, since it has not been chosen for a while, as under load: it is fed no prompts, and
    its KV gaps stay."""
    running: Annotated[int, Metric("outrider_requests_running")] = 0
    """Requests in the last engine step."""


def _what_runs(state: Any, revision: str) -> Iterator[Labelled]:
    yield (
        (revision, state.config_hash, state.product, state.device, state.engine_version, state.profile.target_key),
        1.0,
    )


_NOT_SUMMED = HistogramState(counts=[])
"""TTFT has no figure in the status, and a histogram of it would take a third of a window's memory."""


class RuntimeState(StepCounters, Contract):
    schema_version: int = STATE_SCHEMA
    service: Text
    namespace: Text
    revision: Annotated[
        Text,
        Metric(
            "outrider_info", labels=("revision", "config_hash", "product", "device", "engine_version", "target_key"),
            series=_what_runs,
        ),
    ]  # fmt: skip
    """Always 1; what runs in this pod. Labels `revision`, `config_hash` (digest of the hot config in force), `product`
    (as the node's label names it), `device`, `engine_version`, `target_key` (of the latency profile looked up)."""
    config_hash: Text
    """Digest of the HotConfig in force."""
    config_error: Annotated[Message, Metric("outrider_config_error")] = ""
    """The mounted hot config cannot be used: 1 with a sentence in the state. The one before it stays in force."""
    file_digest: Text = ""
    """Digest of the file of OUTRIDER_CONFIG whose hot fields are in force; empty without such a file."""
    restart_reason: Message = ""
    """What of that file takes effect only after a restart; empty if nothing does."""
    started_at: Annotated[float, Metric("outrider_started_timestamp_seconds")]
    """Unix time at which the process started."""
    reported_at: Annotated[float, Field(alias="now")]
    """Unix time of the report."""
    ready: Annotated[bool, Metric("outrider_ready")]
    """What `/readyz` answers: 1 while the engine is healthy, the plugin reports, and the pod is not draining."""
    plugin_active: Annotated[bool, Metric("outrider_plugin_active")]
    """1 while the controller inside the engine process is active and its last report is fresh."""
    product: Text = ""
    device: Text = ""
    engine_version: Text = ""
    verification: Verification | None = None
    """None before the engine has started."""
    profile: ProfileState = ProfileState()
    choice: ChoiceState = ChoiceState()
    drafters: list[DrafterReport] = []
    slo_classes: list[SLOClassState] = Field(default=[])
    adapters: list[AdapterState] = []
    canary: CanaryState | None = None
    """None without `HotConfig.canary`, and in pods of releases that do not know it."""

    @property
    def counters(self) -> ServiceCounters:
        """What the pod counted since its process started."""
        return ServiceCounters.part_of(self).model_copy(
            update={
                "drafters": {report.name: DrafterCounters.part_of(report) for report in self.drafters},
                "slo_classes": {
                    report.name: SLOClassCounters.part_of(report).model_copy(update={"ttft": _NOT_SUMMED})
                    for report in self.slo_classes
                },
                "adapters": {report.name: AdapterCounters.part_of(report) for report in self.adapters},
            }
        )


class ServiceCounters(StepCounters):
    """Counters of a pod, or sums over the pods of a service. A growth by Prometheus need not be a whole number."""

    drafters: dict[str, DrafterCounters] = {}
    slo_classes: dict[str, SLOClassCounters] = {}
    adapters: dict[str, AdapterCounters] = {}

    @property
    def request_steps(self) -> int:
        """(request, step) pairs, speculative or not."""
        return sum(self.draft_length_steps)

    @property
    def tried(self) -> int:
        return sum(drafter.tried for drafter in self.drafters.values())

    @property
    def accepted(self) -> int:
        return sum(drafter.accepted for drafter in self.drafters.values())

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of a request: 1 + accepted tokens / (request, step) pairs; 0 without such pairs."""
        return 1.0 + self.accepted / self.request_steps if self.request_steps > 0 else 0.0

    def only(self, names: Mapping[str, Container[str]]) -> ServiceCounters:
        """Leave out drafters, classes and adapters that `names` lacks. names: by field."""
        known: dict[str, dict[str, Counters]] = {
            field: {name: counted for name, counted in getattr(self, field).items() if name in names[field]}
            for field in names
        }
        return self.model_copy(update=known)
