"""Says whether Outrider is active in vLLM's server: a line in the log, and the metric `outrider_active`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from prometheus_client import Gauge

from outrider_runtime.error_text import with_type, without_secrets
from outrider_runtime.stock_server.entry_point import logger, report_absence

LONGEST_REASON = 400


class StepAsideError(Exception):
    """Outrider cannot run with this vLLM, these flags or this file; the message says why, in a sentence."""


@contextmanager
def survives(task: str) -> Iterator[None]:
    """Log an error of a task of Outrider's: vLLM serves without its result."""
    try:
        yield
    except Exception as error:
        logger.warning("Outrider cannot %s: %s", task, with_type(error), exc_info=True)


class Activity:
    """Whether Outrider drives the engine of this process."""

    def __init__(self) -> None:
        self.reason = "the engine is starting"
        """Why Outrider is not active; empty if it is."""
        self._gauge = _gauge()
        self._report(self.reason)

    def active(self, drafters: list[str], most: int) -> None:
        self._report("")
        pool = ", ".join(drafters) or "no drafter"
        logger.info("Outrider is active: at most %d draft tokens of %s", most, pool)

    def step_aside(self, reason: str, environ: Mapping[str, str] = os.environ) -> None:
        """Note why vLLM serves without Outrider. Raises SystemExit if the user wants that to be an error."""
        sentence = without_secrets(" ".join(reason.split()))[:LONGEST_REASON]
        self._report(sentence)
        report_absence(sentence, environ)

    def _report(self, reason: str) -> None:
        former, self.reason = self.reason, reason
        with survives("report whether it is active"):
            self._gauge.labels(former).set(0)  # with several processes, prometheus_client cannot remove it
            self._gauge.clear()
            self._gauge.labels(reason).set(not reason)


@cache
def _gauge() -> Gauge:
    """Make the metric once a process, in the registry of vLLM's own metrics."""
    what = "1 while Outrider drives the engine of this server; 0 with the reason while vLLM serves alone."
    return Gauge("outrider_active", what, ["reason"], multiprocess_mode="mostrecent")
