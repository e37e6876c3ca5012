"""The concern of profiles: measuring Jobs, stored profiles, condition ProfilesReady, status.profiles."""

from __future__ import annotations

from outrider_crds.conditions import ConditionReason, ConditionType
from outrider_crds.long_contexts import SelfDraft, self_draft
from outrider_crds.profile import REPROFILE_ANNOTATION, TargetProfile
from outrider_crds.runtime_config import PRODUCT_ANNOTATION
from outrider_crds.spec import CPU_PRODUCT, ProfilingMode, SpeculativeServiceSpec
from outrider_crds.status import BreakEven, LongContextStatus, ProfileStatus

from outrider_operator.cluster_model import CONFIG_MAP, JOB
from outrider_operator.decide.desired.profile_store import Failure
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, earliest_s, false, merge, true
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods.pod_states import LOOK_AGAIN_S, why_not_running
from outrider_operator.decide.pods.pod_troubles import is_being_created, unschedulable_since
from outrider_operator.decide.profiling.jobs import plan_jobs
from outrider_operator.decide.profiling.measurement_request import is_running
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView, stale_in_s, with_nodes
from outrider_operator.decide.profiling.profile_maps import plan_profile_maps, plan_shared_profiles
from outrider_operator.decide.workloads.serving_workload import pods_are_placed
from outrider_operator.validation.reading import annotation, cut, name_of

NOISY_PERCENT = 25.0
"""Run-to-run spread, or held-out error, above which a profile is too noisy to decide by."""
_AGAIN = f"annotate the service with {REPROFILE_ANNOTATION}=<any new value> to measure again"

_LEARNING = ConditionReason.LEARNING
# Reasons why a product is not ready, worst first. The condition shows the worst one of all products.
_RANK = (
    ConditionReason.VOCABULARY_MISMATCH, ConditionReason.PROFILE_FAILED, ConditionReason.CHILD_REJECTED,
    ConditionReason.NO_MATCHING_NODE, ConditionReason.WAITING_FOR_SERVING_POD, ConditionReason.PROFILING,
    ConditionReason.LEARNING, ConditionReason.STALE, ConditionReason.NOISY,
)  # fmt: skip


def profile(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Profiles and their Jobs. Nothing is measured or deleted for a refused spec."""
    report = ConcernOutcome(
        conditions={ConditionType.PROFILES_READY: profiles_ready(intent.view, intent.profiles)},
        status={"profiles": profile_statuses(intent.view, intent.profiles)},
        wake_after_s=_next_look_s(world, intent),
    )
    return merge([report, _writes(world, intent)]) if intent.problem is None else report


def _writes(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    view, profiles = intent.view, intent.profiles
    # A Job that measures would download the models as well.
    is_downloading = intent.prefetch is not None and intent.prefetch.holds
    is_next = pods_are_placed(world.children, intent.desired) and not is_downloading
    jobs = plan_jobs(view, profiles, pods_are_placed=is_next)
    ended = ConcernOutcome(stored=frozenset(job.name for job in jobs.delete))
    return merge([plan_profile_maps(view, profiles), plan_shared_profiles(view, profiles), jobs, ended])


def _next_look_s(world: ServiceWorld, intent: Intent) -> float | None:
    """Seconds until a profile is too old, or until the next look at a Job whose progress no watch delivers."""
    aging = (stale_in_s(intent.desired, profile.keys, profile.store, world.at) for profile in intent.profiles)
    retries = (at - world.at for profile in intent.profiles for at in profile.again_at)
    is_polling = any(profile.job_is_active and profile.pod is None for profile in intent.profiles)
    is_polling = is_polling or any(is_being_created(pod) for pod in world.observed.job_pods)
    return earliest_s((*aging, *retries, LOOK_AGAIN_S if is_polling else None))


def profiles_ready(view: ProfilingView, profiles: list[ProductProfile]) -> Verdict:
    """True when every product has a fresh profile of the target and of every drafter."""
    usable = with_nodes(profiles)
    lacking = [verdict for profile in usable if (verdict := _lacking(view, profile)) is not None]
    if lacking:
        worst = min(lacking, key=lambda verdict: _RANK.index(verdict.reason))
        return false(worst.reason, cut(" ".join(verdict.message for verdict in lacking), 2048))
    products = ", ".join(profile.keys.product for profile in usable)
    others = (profile for profile in profiles if profile not in usable)
    lonely = ", ".join(profile.keys.product for profile in others if not profile.store.covers(profile.keys))
    without_node = f" No node has {lonely}, so nothing runs there." if lonely else ""
    return true(ConditionReason.PROFILED, f"Target and drafters are measured on {products}.{without_node}")


def profile_statuses(view: ProfilingView, profiles: list[ProductProfile]) -> list[ProfileStatus]:
    return [_status(view, profile) for profile in profiles]


def _lacking(view: ProfilingView, profile: ProductProfile) -> Verdict | None:
    """Why one product is not ready; None if it is."""
    return _unstored(view, profile) or _unmeasured(view, profile) or _stale(view, profile) or _noisy(profile)


def _not_ready(profile: ProductProfile, reason: ConditionReason, why: str) -> Verdict:
    return false(reason, f"{profile.keys.product}: {why}.")


def _unstored(view: ProfilingView, profile: ProductProfile) -> Verdict | None:
    """A measurement that the API server refuses to store is not available: pods mount the stored ConfigMap."""
    refused = _refused(view, profile, CONFIG_MAP)
    return _not_ready(profile, ConditionReason.CHILD_REJECTED, f"{refused}; it is tried again") if refused else None


def _unmeasured(view: ProfilingView, profile: ProductProfile) -> Verdict | None:
    if profile.store.covers(profile.keys):
        return None
    if not profile.job_is_active and (failures := _failures(profile)):
        return _failed(profile, failures)
    product = profile.keys.product
    if profile.job_is_active:
        reason, why = _measuring(view, profile)
    else:
        reason, why = _waiting(view, profile)
        if reason is ConditionReason.NO_MATCHING_NODE:
            return false(reason, _no_node(view.desired.spec, product))
    return _not_ready(profile, reason, f"{why}; pods learn their step times online meanwhile")


def _measuring(view: ProfilingView, profile: ProductProfile) -> tuple[ConditionReason, str]:
    """What the Job does. It learns nothing while no node takes its pod, or a quota forbids the pod."""
    warnings, job = view.world.observed.warnings, name_of(profile.job or {})
    if is_running(profile.pod):
        return ConditionReason.PROFILING, f"Job {job} is measuring"
    why = why_not_running(profile.job, profile.pod, warnings, view.world.at) or "its pod is starting"
    has_no_room = warnings.get(job) if profile.pod is None else unschedulable_since(profile.pod) is not None
    reason = ConditionReason.LEARNING if has_no_room else ConditionReason.PROFILING
    return reason, f"Job {job} waits: {why.rstrip('.')}"


def _waiting(view: ProfilingView, profile: ProductProfile) -> tuple[ConditionReason, str]:
    """Why no Job measures."""
    spec, job, refused = view.desired.spec, profile_name(profile.keys.target), _refused(view, profile, JOB)
    cases = (
        (spec.engine.nodes > 1, _LEARNING, "a target over several nodes is not measured before it serves"),
        (spec.profiling.mode is ProfilingMode.SKIP, _LEARNING, "profiling.mode is Skip"),
        (spec.paused, _LEARNING, "spec.paused stops profiling"),
        (refused, ConditionReason.CHILD_REJECTED, f"{refused}; it is tried again"),
        (profile.is_measured_elsewhere, ConditionReason.PROFILING, f"Job {job} of another namespace measures it"),
        (not profile.node_fits, ConditionReason.NO_MATCHING_NODE, ""),
        (
            profile.served_first,
            ConditionReason.WAITING_FOR_SERVING_POD,
            f"serving pod {', '.join(profile.served_first)} starts on the same cores and goes first",
        ),
    )
    return next(((reason, why) for holds, reason, why in cases if holds), (_LEARNING, "not measured yet"))


def _refused(view: ProfilingView, profile: ProductProfile, kind: str) -> str:
    """Why the API server refuses the product's Job or profile; empty if it does not."""
    refusals = (refusal for refusal in view.world.observed.refusals if not refusal.is_stored)
    refused = (r for r in refusals if (r.kind, r.name) == (kind, profile_name(profile.keys.target)))
    said = (f"the API server refuses {r.kind} {r.name}: {r.message.strip().rstrip('.')}" for r in refused)
    return cut(next(said, ""), 1000)


def _stale(view: ProfilingView, profile: ProductProfile) -> Verdict | None:
    if profile.stale:
        failures = _failures(profile)
        age = f"the profile is older than profiling.maxAge ({view.desired.spec.profiling.max_age}) and serves meanwhile"
        if profile.job_is_active:
            return _not_ready(profile, ConditionReason.STALE, f"{age}. A new one is being measured")
        failed = f". Measuring again failed: {_words(failures)}; {_AGAIN}" if failures else ""
        return _not_ready(profile, ConditionReason.STALE, age + failed)
    mismatch = _mismatch(view, profile).rstrip(".")
    return _not_ready(profile, ConditionReason.STALE, f"{mismatch}; {_AGAIN}") if mismatch else None


def _noisy(profile: ProductProfile) -> Verdict | None:
    target = profile.store.target
    if target is None or max(target.spread_percent, target.error_percent) <= NOISY_PERCENT:
        return None
    what = f"spread is {target.spread_percent:.0f}% and its held-out error {target.error_percent:.0f}%"
    why = f"the profile's {what}; the machine was busy. Pods correct it online; {_AGAIN}"
    return _not_ready(profile, ConditionReason.NOISY, why)


def _mismatch(view: ProfilingView, profile: ProductProfile) -> str:
    """Why the mounted profile fits no pod on this product; empty if it fits at least one.

    Nodes of one product may differ (`cpu` is every model of CPU), so one measurement cannot fit them all.
    """
    answers = [
        state.profile.mismatch
        for pod in view.world.pods.ready
        if annotation(pod, PRODUCT_ANNOTATION) == profile.keys.product
        and (state := view.world.states.get(name_of(pod))) is not None
        and state.profile.target_key == profile.keys.target
    ]
    return min(answers) if answers and all(answers) else ""


def _failed(profile: ProductProfile, failures: list[tuple[str, Failure]]) -> Verdict:
    reasons = {failure.reason for _, failure in failures}
    known = (ConditionReason.VOCABULARY_MISMATCH, ConditionReason.NOISY)
    reason = next((reason for reason in known if reason in reasons), ConditionReason.PROFILE_FAILED)
    remedy = "It is tried again by itself" if profile.again_at else f"Change the spec, or {_AGAIN}"
    return _not_ready(profile, reason, f"{_words(failures)}. {remedy}; pods learn online meanwhile")


def _failures(profile: ProductProfile) -> list[tuple[str, Failure]]:
    """(model, failure) of target and drafters that could not be measured under the current settings."""
    named = {"target": profile.keys.target, **{f"drafter {name}": key for name, key in profile.keys.drafters.items()}}
    return [(what, failure) for what, key in named.items() if (failure := profile.failure(key)) is not None]


def _words(failures: list[tuple[str, Failure]]) -> str:
    """A sentence about the failures. Models that failed with the same message are named together."""
    drafters_by_failure: dict[tuple[str, str], list[str]] = {}
    for what, failure in failures:
        drafters_by_failure.setdefault((failure.reason, failure.message), []).append(what)
    return "; ".join(
        f"{' and '.join(what)} could not be measured ({reason}): {message.rstrip('.')}"
        for (reason, message), what in drafters_by_failure.items()
    )


def _no_node(spec: SpeculativeServiceSpec, product: str) -> str:
    accelerator = spec.accelerator
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


def _status(view: ProfilingView, profile: ProductProfile) -> ProfileStatus:
    target = profile.store.target if profile.store.has_target(profile.keys) else None
    failures = _failures(profile)
    failed_keys = [key for key in (profile.keys.target, *profile.keys.drafters.values()) if profile.failure(key)]
    lacking = _lacking(view, profile)
    return ProfileStatus(
        product=profile.keys.product,
        config_map=profile_name(profile.keys.target) if profile.store.target is not None else "",
        error_percent=f"{target.error_percent:.3g}" if target is not None else "",
        profiled_at=target.measured_at if target is not None else "",
        long_contexts=_long_contexts(view.desired.spec, profile, target) if target is not None else [],
        stale=lacking is not None and lacking.reason is ConditionReason.STALE,
        failed_key=failed_keys[0] if failed_keys else "",
        message=cut(_words(failures), 2048) if failures else "",
    )
