"""The concern of downloads: the Job that downloads models into a claim, what conditions say of it, status.prefetch."""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.conditions import ConditionReason
from outrider_crds.status import PrefetchStatus

from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.figures.samples import bytes_text
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.model_download import DownloadPhase, Prefetch, plan_prefetch
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, false, true
from outrider_operator.validation.reading import cut

_MOST_TEXT = 256


def download(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Job and status of the download. Nothing is downloaded for a refused spec."""
    job = plan_prefetch(world, intent.desired, intent.prefetch) if intent.problem is None else ConcernOutcome()
    return replace(job, status={"prefetch": prefetch_status(intent.prefetch)})


def models_progressing(prefetch: Prefetch | None) -> Verdict | None:
    """Progressing, where the wanted revision waits for its models."""
    if prefetch is None or not prefetch.holds:
        return None
    if prefetch.refused is not None:
        said = prefetch.refused.message.strip().rstrip(".")
        why = cut(f"The API server refuses the Job that downloads models: {said}.", 2048)
        return false(ConditionReason.STALLED, why)
    if prefetch.phase is DownloadPhase.FAILED:
        return false(ConditionReason.STALLED, prefetch.why)
    return true(ConditionReason.WAITING_FOR_MODELS, cut(_waiting(prefetch), 2048))


def models_updated(prefetch: Prefetch | None) -> Verdict | None:
    """Updated, where the wanted revision waits for its models."""
    verdict = models_progressing(prefetch)
    return false(ConditionReason.WAITING_FOR_MODELS, verdict.message) if verdict is not None else None


def _waiting(prefetch: Prefetch) -> str:
    what, progress = f"{', '.join(prefetch.models)} into claim {prefetch.claim}", prefetch.progress
    if prefetch.phase is DownloadPhase.WAITING:
        why = f" {prefetch.why.rstrip('.')}." if prefetch.why else ""
        return f"The download of {what} has not begun.{why}"
    if progress is not None and progress.trouble:
        return f"Downloading {what} before pods start is held up: {progress.trouble}."
    if progress is None or not progress.total_bytes:
        return f"Downloading {what} before pods start."
    share = 100 * progress.downloaded_bytes / progress.total_bytes
    amount = f"{bytes_text(progress.downloaded_bytes)} of {bytes_text(progress.total_bytes)} ({share:.0f}%)"
    return f"Downloading {what} before pods start: {amount}."


def prefetch_status(prefetch: Prefetch | None) -> PrefetchStatus | None:
    if prefetch is None or not (prefetch.job is not None or prefetch.is_due):
        return None
    progress = prefetch.progress if prefetch.phase is DownloadPhase.DOWNLOADING else None
    return PrefetchStatus(
        claim_name=cut(prefetch.claim, _MOST_TEXT),
        phase=prefetch.phase.value,
        models=[cut(name, _MOST_TEXT) for name in prefetch.models],
        downloaded=bytes_text(progress.downloaded_bytes) if progress is not None else "",
        total=bytes_text(progress.total_bytes) if progress is not None and progress.total_bytes else "",
    )
