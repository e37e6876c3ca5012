"""One step's drafting in the worker: its order, sorted like the worker's batch, and the report on its results.

The report is ready when the device has finished: at once on a CPU, usually with the next step's output on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.error_text import with_type
from outrider_runtime.loop.confidences import UNKNOWN
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.step_clock import StepClock
from outrider_runtime.vllm_plugin.agreement import Agreement, Failed, RanksDisagreeError, alone
from outrider_runtime.vllm_plugin.messages import DraftOrder, DraftReport

T = TypeVar("T")


class DraftingStep:
    def __init__(
        self, order: DraftOrder, names: Sequence[str], clock: StepClock, agree: Agreement = alone
    ) -> None:  # fmt: skip
        """names: the step's requests, in the order of the columns of `order`."""
        self.order = order
        self._columns = {name: column for column, name in enumerate(names)}
        self._clock = clock
        self._agree = agree
        self.rows: list[int] = []
        """Column of the order, by row of the batch."""
        self._spans: dict[int, tuple[Any, Any]] = {}
        self._catch_ups: dict[int, tuple[Any, Any]] = {}
        self._failures: dict[int, str] = {}
        self._made: torch.Tensor | None = None
        self._end: Any = None

    def begin(self, batch: Sequence[str]) -> None:
        """Begin the step. batch: the requests in the worker's order."""
        self.rows = [self._columns[name] for name in batch]
        self.chosen = self.order.chosen[self.rows]
        self.second = self.order.second[self.rows]

    def rows_of(self, drafter: int) -> npt.NDArray[np.int64]:
        """Return the rows of the batch that may get `drafter`'s proposals."""
        return np.flatnonzero((self.chosen == drafter) | (self.second == drafter))

    def gaps(self, drafter: int) -> list[KVGap]:
        """Return the KV gaps that `drafter` fills; `request` is the row of the batch."""
        return [gap._replace(request=self.rows.index(gap.request)) for gap in self.order.gaps_of(drafter)]

    def run(self, drafter: int, propose: Callable[[], T]) -> T | None:
        """Run and time a member; None if it raised. Raises RanksDisagreeError if it raised on some ranks only."""
        made, span = self._guarded(drafter, propose)
        if span is not None:
            self._spans[drafter] = span
        return made

    def catch_up(self, drafter: int, fill_gaps: Callable[[], object]) -> bool:
        """Run and time the pass that fills gaps; False if it raised. Raises RanksDisagreeError, see `run`."""
        _, span = self._guarded(drafter, fill_gaps)
        if span is not None:
            self._catch_ups[drafter] = span
        return span is not None

    def _guarded(self, drafter: int, work: Callable[[], T]) -> tuple[T | None, tuple[Any, Any] | None]:
        """Return the result of `work` and its span; None twice if it raised: a drafter's error fails no request."""
        began, made, failure = self._clock.mark(), None, ""
        try:
            made = work()
        except Exception as error:
            failure = with_type(error)
        where = self._agree(bool(failure))
        if where is Failed.SOMEWHERE:
            raise RanksDisagreeError(f"number {drafter} of the pool", failure)
        if where is Failed.EVERYWHERE:
            self._failures[drafter] = failure
            return None, None
        return made, (began, self._clock.mark())

    def end(self, made: torch.Tensor | None = None) -> None:
        """End the step.

        made: (2 + most tokens, requests) int8 in the batch's order, on the device. Its rows are the length of each
        request's proposal, its drafter, and the drafter's confidence in each token.
        """
        if made is not None:
            self._made = self._clock.to_host(made)
        self._end = self._clock.mark()

    def wait(self) -> None:
        """Wait until the device has finished drafting."""
        self._clock.wait(self._end)

    @property
    def over(self) -> bool:
        """Whether the device has finished drafting."""
        return self._end is not None and self._clock.passed(self._end)

    def lengths(self) -> list[int]:
        """Return the tokens proposed for each request, in the batch's order; only if `over`."""
        return [0] * len(self.rows) if self._made is None else self._made[0].tolist()

    def report(self) -> DraftReport:
        """Make the report; only if `over`."""
        seconds = np.full(len(self.order.passes), np.nan)
        for drafter, span in self._spans.items():
            seconds[drafter] = self._clock.seconds(*span)
        rows = 2 if self._made is None else len(self._made)
        columns = np.zeros((rows, len(self._columns)), dtype=np.int8)
        columns[1], columns[2:] = NO_DRAFTER, UNKNOWN
        if self._made is not None:
            columns[:, self.rows] = self._made.numpy()
        confidence = columns[2:].T if rows > 2 else None
        caught_up_s = {drafter: self._clock.seconds(*span) for drafter, span in self._catch_ups.items()}
        return DraftReport(
            self.order.step, seconds, columns[0], columns[1], caught_up_s, self._failures, confidence
        )  # fmt: skip
