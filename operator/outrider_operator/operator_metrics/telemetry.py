"""The operator's own Prometheus metrics, served at /metrics on the metrics port."""

from __future__ import annotations

import logging

from prometheus_client import Counter, Gauge, Histogram

from outrider_operator.validation.reading import InvalidInput

logger = logging.getLogger(__name__)

WRITES = Counter("outrider_operator_api_writes", "Requests that write to the API server.", ["verb", "kind"])
RECONCILES = Counter(
    "outrider_operator_reconciles", "Reconciles by outcome: done, observed again, retried, failed.", ["outcome"]
)
RECONCILE_SECONDS = Histogram("outrider_operator_reconcile_seconds", "Duration of a reconcile, its writes included.")
QUEUE_LENGTH = Gauge("outrider_operator_queue_length", "Services waiting for a reconcile.")
OLDEST_RECONCILE_SECONDS = Gauge(
    "outrider_operator_oldest_reconcile_seconds", "Age of the oldest running reconcile; 0 without one."
)
WAIT_SECONDS = Histogram(
    "outrider_operator_wait_seconds", "Time from a service's wake-up to the start of its reconcile."
)
SERVICES = Gauge("outrider_operator_services", "SpeculativeServices that the operator knows.")
LEADING = Gauge("outrider_operator_leading", "1 while this process holds the Lease.")
POLLS = Counter("outrider_operator_polls", "State polls of serving pods by outcome: answered, failed.", ["outcome"])
WATCH_RESTARTS = Counter("outrider_operator_watch_restarts", "Watches restarted after an error.", ["kind"])
UNFIT = Counter(
    "outrider_operator_unfit", "Inputs that validation rejected, by source and reason.", ["source", "reason"]
)
TASK_RESTARTS = Counter("outrider_operator_task_restarts", "Background tasks restarted after a defect.", ["task"])


def count_invalid(unfit: InvalidInput) -> None:
    UNFIT.labels(source=unfit.source, reason=unfit.reason).inc()
    logger.debug("Left out: %s", unfit.detail)
