"""What conditions and status say of a download of models into a claim."""

from __future__ import annotations

from outrider_crds.status import ConditionReason, PrefetchStatus

from outrider_operator.decide.figures.numbers import bytes_text
from outrider_operator.decide.model_download import Prefetch, failure
from outrider_operator.decide.verdict import Verdict, false, true
from outrider_operator.validation.reading import cut

_MOST_TEXT = 256


def models_progressing(prefetch: Prefetch | None) -> Verdict | None:
    """Progressing, where the wanted revision waits for its models."""
    if prefetch is None or not prefetch.holds:
        return None
    if prefetch.refused is not None:
        said = prefetch.refused.message.strip().rstrip(".")
        return false(
            ConditionReason.STALLED, cut(f"The API server refuses the Job that downloads models: {said}.", 2048)
        )
    if prefetch.has_failed:
        return false(ConditionReason.STALLED, failure(prefetch))
    return true(ConditionReason.WAITING_FOR_MODELS, _waiting(prefetch))


def models_updated(prefetch: Prefetch | None) -> Verdict | None:
    """Updated, where the wanted revision waits for its models."""
    verdict = models_progressing(prefetch)
    if verdict is None:
        return None
    return false(ConditionReason.WAITING_FOR_MODELS, verdict.message)


def _waiting(prefetch: Prefetch) -> str:
    what = f"{', '.join(prefetch.models)} into claim {prefetch.claim}"
    if not prefetch.is_downloading:
        why = f" {prefetch.why_not_running.rstrip('.')}." if prefetch.why_not_running else ""
        return cut(f"The download of {what} has not begun.{why}", 2048)
    progress = prefetch.progress
    if progress is not None and progress.trouble:
        return cut(f"Downloading {what} before pods start is held up: {progress.trouble}.", 2048)
    if progress is None or not progress.total_bytes:
        return cut(f"Downloading {what} before pods start.", 2048)
    share = 100 * progress.downloaded_bytes / progress.total_bytes
    amount = f"{bytes_text(progress.downloaded_bytes)} of {bytes_text(progress.total_bytes)} ({share:.0f}%)"
    return cut(f"Downloading {what} before pods start: {amount}.", 2048)


def prefetch_status(prefetch: Prefetch | None) -> PrefetchStatus | None:
    if prefetch is None:
        return None
    if not prefetch.is_current and not prefetch.is_due:
        return None
    phase = _phase(prefetch)
    progress = prefetch.progress if phase == "Downloading" else None
    return PrefetchStatus(
        claim_name=cut(prefetch.claim, _MOST_TEXT),
        phase=phase,
        models=[cut(name, _MOST_TEXT) for name in prefetch.models],
        downloaded=bytes_text(progress.downloaded_bytes) if progress is not None else "",
        total=bytes_text(progress.total_bytes) if progress is not None and progress.total_bytes else "",
    )


def _phase(prefetch: Prefetch) -> str:
    if prefetch.is_complete:
        return "Complete"
    if prefetch.has_failed:
        return "Failed"
    return "Downloading" if prefetch.is_downloading else "Waiting"
