"""Condition ProfilesReady and status.profiles: what is measured, what is not, and why."""

from __future__ import annotations

from collections.abc import Callable

from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.runtime_config import PRODUCT_ANNOTATION
from outrider_crds.spec import CPU_PRODUCT, ProfilingMode
from outrider_crds.status import ProfileStatus, Reason

from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods import living, scheduler_says, unschedulable_since
from outrider_operator.decide.profile_store import Failure
from outrider_operator.decide.profiling.job_outcome import is_running
from outrider_operator.decide.profiling.measurements import Measurement
from outrider_operator.decide.reading import annotation, cut, items, mapping, name_of, text
from outrider_operator.model import Object, Observed

NOISY_PERCENT = 25.0
"""Run-to-run spread, or held-out error, from which on a profile is no good base for decisions."""
_AGAIN = f"annotate the service with {REPROFILE_ANNOTATION}=<any new value> to measure again"

# What keeps a product from being ready, worst first; the condition carries the first that any product has.
_RANK = (
    Reason.VOCABULARY_MISMATCH,
    Reason.PROFILE_FAILED,
    Reason.NO_MATCHING_NODE,
    Reason.WAITING_FOR_SERVING_POD,
    Reason.PROFILING,
    Reason.LEARNING,
    Reason.STALE,
    Reason.NOISY,
)


def profiles_ready(observed: Observed, intent: Intent, found: list[Measurement]) -> Verdict:
    """True when every product has a fresh profile of the target and of every drafter."""
    lacking = [verdict for each in found if (verdict := _lacking(observed, intent, each)) is not None]
    if not lacking:
        products = ", ".join(each.keys.product for each in found)
        return true(Reason.PROFILED, f"Target and drafters are measured on {products}.")
    worst = min(lacking, key=lambda verdict: _RANK.index(verdict.reason))
    return false(worst.reason, cut(" ".join(verdict.message for verdict in lacking), 2048))


def profile_statuses(observed: Observed, intent: Intent, found: list[Measurement]) -> list[ProfileStatus]:
    return [_status(observed, intent, each) for each in found]


def _lacking(observed: Observed, intent: Intent, each: Measurement) -> Verdict | None:
    """Why one product is not ready; None when it is."""
    checks: tuple[Callable[[Observed, Intent, Measurement], Verdict | None], ...] = (_unmeasured, _stale, _noisy)
    return next((verdict for check in checks if (verdict := check(observed, intent, each)) is not None), None)


def _unmeasured(observed: Observed, intent: Intent, each: Measurement) -> Verdict | None:
    if each.store.covers(each.keys):
        return None
    failures = _failures(each)
    if failures and not each.job_is_active:
        return _failed(each, failures)
    return _waiting(observed, intent, each)


def _waiting(observed: Observed, intent: Intent, each: Measurement) -> Verdict:
    product, served_first = each.keys.product, ", ".join(each.served_first)
    learning = "pods learn their step times online meanwhile"
    if each.job_is_active:
        no_room = each.pod is not None and unschedulable_since(each.pod) is not None
        return false(Reason.LEARNING if no_room else Reason.PROFILING, _job_sentence(observed, each))
    if intent.spec.profiling.mode is ProfilingMode.SKIP:
        return false(Reason.LEARNING, f"{product}: profiling.mode is Skip; pods learn their step times online.")
    if intent.spec.paused:
        return false(Reason.LEARNING, f"{product}: spec.paused stops profiling; {learning}.")
    if not each.node_fits:
        return false(Reason.NO_MATCHING_NODE, _no_node(intent, product))
    if served_first:
        return false(
            Reason.WAITING_FOR_SERVING_POD,
            f"{product}: serving pod {served_first} needs the same accelerator and goes first; {learning}.",
        )
    return false(Reason.LEARNING, f"{product}: not measured yet; {learning}.")


def _stale(observed: Observed, intent: Intent, each: Measurement) -> Verdict | None:
    if each.stale:
        running = " A new one is being measured." if each.job_is_active else ""
        failures = _failures(each)
        failed = f" Measuring again failed: {_words(failures)}; {_AGAIN}." if failures and not running else ""
        age = intent.spec.profiling.max_age
        return false(
            Reason.STALE,
            f"{each.keys.product}: the profile is older than profiling.maxAge ({age}) and serves meanwhile."
            f"{running}{failed}",
        )
    mismatch = _mismatch(observed, each)
    if mismatch:
        return false(Reason.STALE, f"{each.keys.product}: {mismatch.rstrip('.')}; {_AGAIN}.")
    return None


def _noisy(_observed: Observed, _intent: Intent, each: Measurement) -> Verdict | None:
    target = each.store.target
    if target is None or max(target.spread_percent, target.error_percent) <= NOISY_PERCENT:
        return None
    return false(
        Reason.NOISY,
        f"{each.keys.product}: the profile's spread is {target.spread_percent:.0f}% and its held-out error "
        f"{target.error_percent:.0f}%; the machine was busy. Pods correct it online; {_AGAIN}.",
    )


def _mismatch(observed: Observed, each: Measurement) -> str:
    """What a pod on this product says about the mounted profile; empty when none objects."""
    said = sorted(
        state.profile.mismatch
        for pod in living(observed)
        if annotation(pod, PRODUCT_ANNOTATION) == each.keys.product
        and (state := observed.states.get(name_of(pod))) is not None
        and state.profile.mismatch
        and state.profile.target_key == each.keys.target
    )
    return said[0] if said else ""


def _failed(each: Measurement, failures: list[tuple[str, Failure]]) -> Verdict:
    told = {failure.reason for _, failure in failures}
    reason = next((r for r in (Reason.VOCABULARY_MISMATCH, Reason.NOISY) if r in told), Reason.PROFILE_FAILED)
    return false(
        reason, f"{each.keys.product}: {_words(failures)}. Change the spec, or {_AGAIN}; pods learn online meanwhile."
    )


def _failures(each: Measurement) -> list[tuple[str, Failure]]:
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


def _job_sentence(observed: Observed, each: Measurement) -> str:
    job = name_of(each.job) if each.job is not None else ""
    if is_running(each.pod):
        return f"{each.keys.product}: Job {job} is measuring; pods learn their step times online meanwhile."
    pod = each.pod or {}
    warning = cut(observed.pod_warnings.get(name_of(pod), ""), 500)
    why = scheduler_says(pod) or _container_waits(pod) or warning or "its pod is starting"
    return f"{each.keys.product}: Job {job} waits: {why.rstrip('.')}; pods learn their step times online meanwhile."


def _container_waits(pod: Object) -> str:
    for status in items(pod, "status", "containerStatuses"):
        waiting = mapping(status, "state", "waiting")
        if text(waiting, "reason") not in ("", "ContainerCreating", "PodInitializing"):
            return cut(f"{text(waiting, 'reason')}: {text(waiting, 'message')}", 400)
    return ""


def _no_node(intent: Intent, product: str) -> str:
    accelerator = intent.spec.accelerator
    if product == CPU_PRODUCT:
        return "No node fits accelerator.nodeSelector and accelerator.tolerations: the pods wait for one."
    return (
        f"No node has {accelerator.product_label}={product} with {accelerator.resource_name} to give (and fits "
        "nodeSelector and tolerations): its pods wait for one. Add such a node, or change accelerator.products."
    )


def _status(observed: Observed, intent: Intent, each: Measurement) -> ProfileStatus:
    target = each.store.target if each.store.has_target(each.keys) else None
    failures = _failures(each)
    failed_keys = [key for key in (each.keys.target, *each.keys.drafters.values()) if each.failure(key)]
    lacking = _lacking(observed, intent, each)
    return ProfileStatus(
        product=each.keys.product,
        config_map=profile_name(each.keys.target) if each.store.target is not None else "",
        error_percent=f"{target.error_percent:.3g}" if target is not None else "",
        profiled_at=target.measured_at if target is not None else "",
        stale=lacking is not None and lacking.reason is Reason.STALE,
        failed_key=failed_keys[0] if failed_keys else "",
        message=cut(_words(failures), 2048) if failures else "",
    )
