"""Condition ProfilesReady and status.profiles: what is measured, what is not, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider_crds.long_contexts import SelfDraft, self_draft
from outrider_crds.profile import REPROFILE_ANNOTATION, TargetProfile
from outrider_crds.runtime_config import PRODUCT_ANNOTATION
from outrider_crds.spec import CPU_PRODUCT, ProfilingMode, SpeculativeServiceSpec
from outrider_crds.state import RuntimeState
from outrider_crds.status import BreakEven, LongContextStatus, ProfileStatus, Reason

from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods import Pods, scheduler_says, unschedulable_since, without_made_up_name
from outrider_operator.decide.profile_store import Failure
from outrider_operator.decide.profiling.job_outcome import is_running
from outrider_operator.decide.profiling.product_profiles import ProductProfile, with_nodes
from outrider_operator.inbound.reading import annotation, cut, items, mapping, name_of, text
from outrider_operator.model import CONFIG_MAP, JOB, Object, Rejection

NOISY_PERCENT = 25.0
"""Run-to-run spread, or held-out error, from which on a profile is no good base for decisions."""
_AGAIN = f"annotate the service with {REPROFILE_ANNOTATION}=<any new value> to measure again"

# What keeps a product from being ready, worst first; the condition carries the first that any product has.
_RANK = (
    Reason.VOCABULARY_MISMATCH,
    Reason.PROFILE_FAILED,
    Reason.CHILD_REJECTED,
    Reason.NO_MATCHING_NODE,
    Reason.WAITING_FOR_SERVING_POD,
    Reason.PROFILING,
    Reason.LEARNING,
    Reason.STALE,
    Reason.NOISY,
)


@dataclass(frozen=True)
class Seen:
    """What says why a profile is not there, or does not fit."""

    asked: Intent
    pods: Pods
    states: Mapping[str, RuntimeState]
    """Name of a ready pod -> what it answered lately."""
    warnings: Mapping[str, str]
    """Name of a Job, or of its pod, -> newest Warning event."""
    rejections: tuple[Rejection, ...]
    """Of Jobs and profiles."""


def profiles_ready(seen: Seen, found: list[ProductProfile]) -> Verdict:
    """True when every product has a fresh profile of the target and of every drafter."""
    usable = with_nodes(found)
    lacking = [verdict for profile in usable if (verdict := _lacking(seen, profile)) is not None]
    if not lacking:
        products = ", ".join(profile.keys.product for profile in usable)
        return true(Reason.PROFILED, f"Target and drafters are measured on {products}.{_without_node(found, usable)}")
    worst = min(lacking, key=lambda verdict: _RANK.index(verdict.reason))
    return false(worst.reason, cut(" ".join(verdict.message for verdict in lacking), 2048))


def _without_node(found: list[ProductProfile], usable: list[ProductProfile]) -> str:
    left = [
        profile.keys.product for profile in found if profile not in usable and not profile.store.covers(profile.keys)
    ]
    return f" No node has {', '.join(left)}, so nothing runs there." if left else ""


def profile_statuses(seen: Seen, found: list[ProductProfile]) -> list[ProfileStatus]:
    return [_status(seen, each) for each in found]


def _lacking(seen: Seen, each: ProductProfile) -> Verdict | None:
    """Why one product is not ready; None when it is."""
    checks: tuple[Callable[[Seen, ProductProfile], Verdict | None], ...] = (_unstored, _unmeasured, _stale, _noisy)
    return next((verdict for check in checks if (verdict := check(seen, each)) is not None), None)


def _unstored(seen: Seen, each: ProductProfile) -> Verdict | None:
    """Pods mount what is stored: a measurement that the API server keeps out of its ConfigMap is none to them."""
    refused = _refused(seen, each, CONFIG_MAP)
    return false(Reason.CHILD_REJECTED, f"{each.keys.product}: {refused}; it is tried again.") if refused else None


def _unmeasured(seen: Seen, each: ProductProfile) -> Verdict | None:
    if each.store.covers(each.keys):
        return None
    failures = _failures(each)
    if failures and not each.job_is_active:
        return _failed(each, failures)
    return _waiting(seen, each)


def _waiting(seen: Seen, each: ProductProfile) -> Verdict:
    product, served_first = each.keys.product, ", ".join(each.served_first)
    learning = "pods learn their step times online meanwhile"
    if each.job_is_active:
        return false(Reason.PROFILING if _moves(seen, each) else Reason.LEARNING, _job_sentence(seen, each))
    if seen.asked.spec.profiling.mode is ProfilingMode.SKIP:
        return false(Reason.LEARNING, f"{product}: profiling.mode is Skip; pods learn their step times online.")
    if seen.asked.spec.paused:
        return false(Reason.LEARNING, f"{product}: spec.paused stops profiling; {learning}.")
    if refused := _refused(seen, each, JOB):
        return false(Reason.CHILD_REJECTED, f"{product}: {refused}; it is tried again; {learning}.")
    if each.is_measured_elsewhere:
        job = profile_name(each.keys.target)
        return false(Reason.PROFILING, f"{product}: Job {job} of another namespace measures it; {learning}.")
    if not each.node_fits:
        return false(Reason.NO_MATCHING_NODE, _no_node(seen.asked, product))
    if served_first:
        return false(
            Reason.WAITING_FOR_SERVING_POD,
            f"{product}: serving pod {served_first} starts on the same cores and goes first; {learning}.",
        )
    return false(Reason.LEARNING, f"{product}: not measured yet; {learning}.")


def _refused(seen: Seen, each: ProductProfile, kind: str) -> str:
    """What the API server has against the product's Job or profile; empty when nothing."""
    refused = (r for r in seen.rejections if (r.kind, r.name) == (kind, profile_name(each.keys.target)))
    said = (f"the API server refuses {r.kind} {r.name}: {r.message.strip().rstrip('.')}" for r in refused)
    return cut(next(said, ""), 1000)


def _stale(seen: Seen, each: ProductProfile) -> Verdict | None:
    if each.stale:
        running = " A new one is being measured." if each.job_is_active else ""
        failures = _failures(each)
        failed = f" Measuring again failed: {_words(failures)}; {_AGAIN}." if failures and not running else ""
        age = seen.asked.spec.profiling.max_age
        return false(
            Reason.STALE,
            f"{each.keys.product}: the profile is older than profiling.maxAge ({age}) and serves meanwhile."
            f"{running}{failed}",
        )
    mismatch = _mismatch(seen, each)
    if mismatch:
        return false(Reason.STALE, f"{each.keys.product}: {mismatch.rstrip('.')}; {_AGAIN}.")
    return None


def _noisy(_seen: Seen, each: ProductProfile) -> Verdict | None:
    target = each.store.target
    if target is None or max(target.spread_percent, target.error_percent) <= NOISY_PERCENT:
        return None
    return false(
        Reason.NOISY,
        f"{each.keys.product}: the profile's spread is {target.spread_percent:.0f}% and its held-out error "
        f"{target.error_percent:.0f}%; the machine was busy. Pods correct it online; {_AGAIN}.",
    )


def _mismatch(seen: Seen, each: ProductProfile) -> str:
    """What the pods on this product say about the mounted profile; empty unless it fits none of them.

    Nodes of one product may differ (`cpu` is every model of CPU): one measurement cannot fit them all.
    """
    answers = [
        state.profile.mismatch
        for pod in seen.pods.ready
        if annotation(pod, PRODUCT_ANNOTATION) == each.keys.product
        and (state := seen.states.get(name_of(pod))) is not None
        and state.profile.target_key == each.keys.target
    ]
    return min(answers) if answers and all(answers) else ""


def _failed(each: ProductProfile, failures: list[tuple[str, Failure]]) -> Verdict:
    told = {failure.reason for _, failure in failures}
    reason = next((r for r in (Reason.VOCABULARY_MISMATCH, Reason.NOISY) if r in told), Reason.PROFILE_FAILED)
    return false(
        reason, f"{each.keys.product}: {_words(failures)}. Change the spec, or {_AGAIN}; pods learn online meanwhile."
    )


def _failures(each: ProductProfile) -> list[tuple[str, Failure]]:
    """(what, failure) for target and drafters that failed under the present settings."""
    named = [("target", each.keys.target), *((f"drafter {name}", key) for name, key in each.keys.drafters.items())]
    found = ((what, each.failure(key)) for what, key in named)
    return [(what, failure) for what, failure in found if failure is not None]


def _words(failures: list[tuple[str, Failure]]) -> str:
    """The failures in a sentence; several keys that failed in the same words are named together."""
    told: dict[tuple[str, str], list[str]] = {}
    for what, failure in failures:
        told.setdefault((failure.reason, failure.message), []).append(what)
    return "; ".join(
        f"{' and '.join(what)} could not be measured ({reason}): {message.rstrip('.')}"
        for (reason, message), what in told.items()
    )


def _moves(seen: Seen, each: ProductProfile) -> bool:
    """False while the Job waits for room: no node takes its pod, or a quota forbids to make one."""
    if each.pod is None:
        return not seen.warnings.get(name_of(each.job or {}))
    return unschedulable_since(each.pod) is None


def _job_sentence(seen: Seen, each: ProductProfile) -> str:
    job = name_of(each.job or {})
    if is_running(each.pod):
        return f"{each.keys.product}: Job {job} is measuring; pods learn their step times online meanwhile."
    pod = each.pod or {}
    warning = cut(without_made_up_name(seen.warnings.get(name_of(pod) or job, "")), 500)
    why = scheduler_says(pod) or _container_waits(pod) or warning or "its pod is starting"
    return f"{each.keys.product}: Job {job} waits: {why.rstrip('.')}; pods learn their step times online meanwhile."


def _container_waits(pod: Object) -> str:
    for status in items(pod, "status", "containerStatuses"):
        waiting = mapping(status, "state", "waiting")
        if text(waiting, "reason") not in ("", "ContainerCreating", "PodInitializing"):
            return cut(f"{text(waiting, 'reason')}: {text(waiting, 'message')}", 400)
    return ""


def _no_node(asked: Intent, product: str) -> str:
    accelerator = asked.spec.accelerator
    if product == CPU_PRODUCT:
        return "No node fits accelerator.nodeSelector and accelerator.tolerations: the pods wait for one."
    return (
        f"No node has {accelerator.product_label}={product} with {accelerator.resource_name} to give (and fits "
        "nodeSelector and tolerations): its pods wait for one. Add such a node, or change accelerator.products."
    )


def _long_contexts(
    spec: SpeculativeServiceSpec, each: ProductProfile, target: TargetProfile
) -> list[LongContextStatus]:
    found = []
    for drafter in spec.draft_pool:
        profile = each.store.drafters.get(each.keys.drafters[drafter.name])
        if drafter.sparse_self is not None and profile is not None:
            one = self_draft(target, profile, drafter.sparse_self, spec.speculation.max_draft_tokens)
            found.append(_long_context(drafter.name, one))
    return found


def _long_context(drafter: str, one: SelfDraft) -> LongContextStatus:
    even = [(batch, tokens) for batch in one.batches if (tokens := one.break_even_tokens(batch)) is not None]
    return LongContextStatus(
        drafter=drafter,
        break_even=[BreakEven(requests=batch, context_tokens=tokens) for batch, tokens in even],
        inflection_tokens=one.inflection_tokens(),
    )


def _status(seen: Seen, each: ProductProfile) -> ProfileStatus:
    target = each.store.target if each.store.has_target(each.keys) else None
    failures = _failures(each)
    failed_keys = [key for key in (each.keys.target, *each.keys.drafters.values()) if each.failure(key)]
    lacking = _lacking(seen, each)
    return ProfileStatus(
        product=each.keys.product,
        config_map=profile_name(each.keys.target) if each.store.target is not None else "",
        error_percent=f"{target.error_percent:.3g}" if target is not None else "",
        profiled_at=target.measured_at if target is not None else "",
        long_contexts=_long_contexts(seen.asked.spec, each, target) if target is not None else [],
        stale=lacking is not None and lacking.reason is Reason.STALE,
        failed_key=failed_keys[0] if failed_keys else "",
        message=cut(_words(failures), 2048) if failures else "",
    )
