"""The concern of downloads: the Job that downloads models into a claim, and status.prefetch."""

from __future__ import annotations

from dataclasses import replace

from outrider_operator.decide.conditions.downloads import prefetch_status
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.model_download import plan_prefetch
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.service_world import ServiceWorld


def download(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Job and status of the download. Nothing is downloaded for a refused spec."""
    job = plan_prefetch(world, intent.desired, intent.prefetch) if intent.problem is None else ConcernOutcome()
    return replace(job, status={"prefetch": prefetch_status(intent.prefetch)})
