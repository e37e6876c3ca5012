"""Condition ProfilesReady and status.profiles: which products are measured, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider_crds.long_contexts import SelfDraft, self_draft
from outrider_crds.profile import REPROFILE_ANNOTATION, TargetProfile
from outrider_crds.runtime_config import PRODUCT_ANNOTATION
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import CPU_PRODUCT, ProfilingMode, SpeculativeServiceSpec
from outrider_crds.status import BreakEven, ConditionReason, LongContextStatus, ProfileStatus

from outrider_operator.cluster_model import CONFIG_MAP, JOB, ApiRefusal
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pod_states import Pods, why_not_running
from outrider_operator.decide.pod_troubles import unschedulable_since
from outrider_operator.decide.profile_store import Failure
from outrider_operator.decide.profiling.job_outcome import is_running
from outrider_operator.decide.profiling.product_profiles import ProductProfile, with_nodes
from outrider_operator.decide.verdict import Verdict, false, true
from outrider_operator.validation.reading import annotation, cut, name_of

NOISY_PERCENT = 25.0
"""Run-to-run spread, or held-out error, above which a profile is too noisy to decide by."""
_AGAIN = f"annotate the service with {REPROFILE_ANNOTATION}=<any new value> to measure again"

# Reasons why a product is not ready, worst first. The condition shows the worst one of all products.
_RANK = (
    ConditionReason.VOCABULARY_MISMATCH,
    ConditionReason.PROFILE_FAILED,
    ConditionReason.CHILD_REJECTED,
    ConditionReason.NO_MATCHING_NODE,
    ConditionReason.WAITING_FOR_SERVING_POD,
    ConditionReason.PROFILING,
    ConditionReason.LEARNING,
    ConditionReason.STALE,
    ConditionReason.NOISY,
)


@dataclass(frozen=True)
class ProfileInputs:
    """Observations that explain why a profile is missing or does not fit."""

    desired: DesiredState
    pods: Pods
    states: Mapping[str, RuntimeState]
    """Name of a ready pod -> its last report."""
    warnings: Mapping[str, str]
    """Name of a Job or of its pod -> newest Warning event."""
    refusals: tuple[ApiRefusal, ...]
    """Refused writes of Jobs and profiles."""


def profiles_ready(inputs: ProfileInputs, profiles: list[ProductProfile]) -> Verdict:
    """True when every product has a fresh profile of the target and of every drafter."""
    usable = with_nodes(profiles)
    lacking = [verdict for profile in usable if (verdict := _lacking(inputs, profile)) is not None]
    if not lacking:
        products = ", ".join(profile.keys.product for profile in usable)
        return true(
            ConditionReason.PROFILED,
            f"Target and drafters are measured on {products}.{_without_node(profiles, usable)}",
        )
    worst = min(lacking, key=lambda verdict: _RANK.index(verdict.reason))
    return false(worst.reason, cut(" ".join(verdict.message for verdict in lacking), 2048))


def _without_node(profiles: list[ProductProfile], usable: list[ProductProfile]) -> str:
    without_node = [
        profile.keys.product for profile in profiles if profile not in usable and not profile.store.covers(profile.keys)
    ]
    return f" No node has {', '.join(without_node)}, so nothing runs there." if without_node else ""


def profile_statuses(inputs: ProfileInputs, profiles: list[ProductProfile]) -> list[ProfileStatus]:
    return [_status(inputs, profile) for profile in profiles]


def _lacking(inputs: ProfileInputs, profile: ProductProfile) -> Verdict | None:
    """Why one product is not ready; None if it is."""
    checks: tuple[Callable[[ProfileInputs, ProductProfile], Verdict | None], ...] = (
        _unstored,
        _unmeasured,
        _stale,
        _noisy,
    )
    return next((verdict for check in checks if (verdict := check(inputs, profile)) is not None), None)


def _unstored(inputs: ProfileInputs, profile: ProductProfile) -> Verdict | None:
    """A measurement that the API server refuses to store is not available: pods mount the stored ConfigMap."""
    refused = _refused(inputs, profile, CONFIG_MAP)
    return (
        false(ConditionReason.CHILD_REJECTED, f"{profile.keys.product}: {refused}; it is tried again.")
        if refused
        else None
    )


def _unmeasured(inputs: ProfileInputs, profile: ProductProfile) -> Verdict | None:
    if profile.store.covers(profile.keys):
        return None
    failures = _failures(profile)
    if failures and not profile.job_is_active:
        return _failed(profile, failures)
    return _waiting(inputs, profile)


def _waiting(inputs: ProfileInputs, profile: ProductProfile) -> Verdict:
    product, served_first = profile.keys.product, ", ".join(profile.served_first)
    learning = "pods learn their step times online meanwhile"
    if profile.job_is_active:
        return false(
            ConditionReason.PROFILING if _moves(inputs, profile) else ConditionReason.LEARNING,
            _job_sentence(inputs, profile),
        )
    if inputs.desired.spec.engine.nodes > 1:
        what = "a target over several nodes is not measured before it serves"
        return false(ConditionReason.LEARNING, f"{product}: {what}; pods learn their step times online.")
    if inputs.desired.spec.profiling.mode is ProfilingMode.SKIP:
        return false(
            ConditionReason.LEARNING, f"{product}: profiling.mode is Skip; pods learn their step times online."
        )
    if inputs.desired.spec.paused:
        return false(ConditionReason.LEARNING, f"{product}: spec.paused stops profiling; {learning}.")
    if refused := _refused(inputs, profile, JOB):
        return false(ConditionReason.CHILD_REJECTED, f"{product}: {refused}; it is tried again; {learning}.")
    if profile.is_measured_elsewhere:
        job = profile_name(profile.keys.target)
        return false(ConditionReason.PROFILING, f"{product}: Job {job} of another namespace measures it; {learning}.")
    if not profile.node_fits:
        return false(ConditionReason.NO_MATCHING_NODE, _no_node(inputs.desired, product))
    if served_first:
        return false(
            ConditionReason.WAITING_FOR_SERVING_POD,
            f"{product}: serving pod {served_first} starts on the same cores and goes first; {learning}.",
        )
    return false(ConditionReason.LEARNING, f"{product}: not measured yet; {learning}.")


def _refused(inputs: ProfileInputs, profile: ProductProfile, kind: str) -> str:
    """Why the API server refuses the product's Job or profile; empty if it does not."""
    refused = (r for r in inputs.refusals if (r.kind, r.name) == (kind, profile_name(profile.keys.target)))
    said = (f"the API server refuses {r.kind} {r.name}: {r.message.strip().rstrip('.')}" for r in refused)
    return cut(next(said, ""), 1000)


def _stale(inputs: ProfileInputs, profile: ProductProfile) -> Verdict | None:
    if profile.stale:
        running = " A new one is being measured." if profile.job_is_active else ""
        failures = _failures(profile)
        failed = f" Measuring again failed: {_words(failures)}; {_AGAIN}." if failures and not running else ""
        age = inputs.desired.spec.profiling.max_age
        return false(
            ConditionReason.STALE,
            f"{profile.keys.product}: the profile is older than profiling.maxAge ({age}) and serves meanwhile."
            f"{running}{failed}",
        )
    mismatch = _mismatch(inputs, profile)
    if mismatch:
        return false(ConditionReason.STALE, f"{profile.keys.product}: {mismatch.rstrip('.')}; {_AGAIN}.")
    return None


def _noisy(_seen: ProfileInputs, profile: ProductProfile) -> Verdict | None:
    target = profile.store.target
    if target is None or max(target.spread_percent, target.error_percent) <= NOISY_PERCENT:
        return None
    return false(
        ConditionReason.NOISY,
        f"{profile.keys.product}: the profile's spread is {target.spread_percent:.0f}% and its held-out error "
        f"{target.error_percent:.0f}%; the machine was busy. Pods correct it online; {_AGAIN}.",
    )


def _mismatch(inputs: ProfileInputs, profile: ProductProfile) -> str:
    """Why the mounted profile fits no pod on this product; empty if it fits at least one.

    Nodes of one product may differ (`cpu` is every model of CPU), so one measurement cannot fit them all.
    """
    answers = [
        state.profile.mismatch
        for pod in inputs.pods.ready
        if annotation(pod, PRODUCT_ANNOTATION) == profile.keys.product
        and (state := inputs.states.get(name_of(pod))) is not None
        and state.profile.target_key == profile.keys.target
    ]
    return min(answers) if answers and all(answers) else ""


def _failed(profile: ProductProfile, failures: list[tuple[str, Failure]]) -> Verdict:
    reasons = {failure.reason for _, failure in failures}
    reason = next(
        (r for r in (ConditionReason.VOCABULARY_MISMATCH, ConditionReason.NOISY) if r in reasons),
        ConditionReason.PROFILE_FAILED,
    )
    return false(
        reason,
        f"{profile.keys.product}: {_words(failures)}. {_remedy(profile)}; pods learn online meanwhile.",
    )


def _remedy(profile: ProductProfile) -> str:
    return "It is tried again by itself" if profile.again_at else f"Change the spec, or {_AGAIN}"


def _failures(profile: ProductProfile) -> list[tuple[str, Failure]]:
    """(model, failure) of target and drafters that could not be measured under the current settings."""
    named = [
        ("target", profile.keys.target),
        *((f"drafter {name}", key) for name, key in profile.keys.drafters.items()),
    ]
    failures = ((what, profile.failure(key)) for what, key in named)
    return [(what, failure) for what, failure in failures if failure is not None]


def _words(failures: list[tuple[str, Failure]]) -> str:
    """A sentence about the failures. Models that failed with the same message are named together."""
    drafters_by_failure: dict[tuple[str, str], list[str]] = {}
    for what, failure in failures:
        drafters_by_failure.setdefault((failure.reason, failure.message), []).append(what)
    return "; ".join(
        f"{' and '.join(what)} could not be measured ({reason}): {message.rstrip('.')}"
        for (reason, message), what in drafters_by_failure.items()
    )


def _moves(inputs: ProfileInputs, profile: ProductProfile) -> bool:
    """False while the Job waits for room: no node takes its pod, or a quota forbids the pod."""
    if profile.pod is None:
        return not inputs.warnings.get(name_of(profile.job or {}))
    return unschedulable_since(profile.pod) is None


def _job_sentence(inputs: ProfileInputs, profile: ProductProfile) -> str:
    job = name_of(profile.job or {})
    if is_running(profile.pod):
        return f"{profile.keys.product}: Job {job} is measuring; pods learn their step times online meanwhile."
    why = why_not_running(profile.job, profile.pod, inputs.warnings, inputs.pods.at) or "its pod is starting"
    return f"{profile.keys.product}: Job {job} waits: {why.rstrip('.')}; pods learn their step times online meanwhile."


def _no_node(desired: DesiredState, product: str) -> str:
    accelerator = desired.spec.accelerator
    if product == CPU_PRODUCT:
        return "No node fits accelerator.nodeSelector and accelerator.tolerations: the pods wait for one."
    return (
        f"No node has {accelerator.product_label}={product} with {accelerator.resource_name} to give (and fits "
        "nodeSelector and tolerations): its pods wait for one. Add such a node, or change accelerator.products."
    )


def _long_contexts(
    spec: SpeculativeServiceSpec, profile: ProductProfile, target: TargetProfile
) -> list[LongContextStatus]:
    contexts = []
    for drafter in spec.draft_pool:
        drafter_profile = profile.store.drafters.get(profile.keys.drafters[drafter.name])
        if drafter.sparse_self is not None and drafter_profile is not None:
            draft = self_draft(target, drafter_profile, drafter.sparse_self, spec.speculation.max_draft_tokens)
            contexts.append(_long_context(drafter.name, draft))
    return contexts


def _long_context(drafter: str, draft: SelfDraft) -> LongContextStatus:
    even = [(batch, tokens) for batch in draft.batches if (tokens := draft.break_even_tokens(batch)) is not None]
    return LongContextStatus(
        drafter=drafter,
        break_even=[BreakEven(requests=batch, context_tokens=tokens) for batch, tokens in even],
        inflection_tokens=draft.inflection_tokens(),
    )


def _status(inputs: ProfileInputs, profile: ProductProfile) -> ProfileStatus:
    target = profile.store.target if profile.store.has_target(profile.keys) else None
    failures = _failures(profile)
    failed_keys = [key for key in (profile.keys.target, *profile.keys.drafters.values()) if profile.failure(key)]
    lacking = _lacking(inputs, profile)
    return ProfileStatus(
        product=profile.keys.product,
        config_map=profile_name(profile.keys.target) if profile.store.target is not None else "",
        error_percent=f"{target.error_percent:.3g}" if target is not None else "",
        profiled_at=target.measured_at if target is not None else "",
        long_contexts=_long_contexts(inputs.desired.spec, profile, target) if target is not None else [],
        stale=lacking is not None and lacking.reason is ConditionReason.STALE,
        failed_key=failed_keys[0] if failed_keys else "",
        message=cut(_words(failures), 2048) if failures else "",
    )
