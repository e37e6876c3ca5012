"""Who may draft, and how far: the pool under the settings in force, suspensions and a pin."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.settings import DrafterSpec, DraftPrefill, HotSettings, Mode, Settings


class Roster:
    """The pool's drafters by number, as they may be used at present. Settings change between two steps."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hot = settings.hot
        self.names = [drafter.name for drafter in settings.drafters]
        self.suspended: dict[str, str] = {}
        """Drafter -> why it does not run, in a sentence."""
        self.pinned: tuple[int, str | None] | None = None
        self.usable: NDArray[np.bool_]
        """(D,): drafters that may run at all."""
        self.anyone: bool
        """Whether one of them may."""
        self._count_usable()
        self._tpots_s = _tpots_s(settings.hot)

    @property
    def neural(self) -> DrafterSpec | None:
        return self.settings.neural

    @property
    def neural_runs(self) -> bool:
        """Whether the neural draft may run at all."""
        neural = self.settings.neural
        return (
            neural is not None
            and neural.name not in self.suspended
            and self.hot.draft_prefill is not DraftPrefill.NEVER
        )

    @property
    def silent(self) -> bool:
        """Nothing is proposed and nothing verified: mode Off."""
        return self.pinned is None and (self.hot.mode is Mode.OFF or self.most_tokens == 0)

    @property
    def tpots_s(self) -> Mapping[str | None, float]:
        """Class -> TPOT. Empty while pinned: a pin measures the engine as it is."""
        return self._tpots_s if self.pinned is None else {}

    @property
    def most_tokens(self) -> int:
        """Longest draft that engine and settings allow."""
        return max(0, min(self.settings.max_draft_tokens, self.hot.max_draft_tokens))

    def configure(self, hot: HotSettings) -> None:
        self.hot = hot
        self._count_usable()
        self._tpots_s = _tpots_s(hot)

    def suspend(self, drafter: str, reason: str) -> None:
        """Raises ValueError for a drafter that is not in the pool."""
        self._known(drafter)
        self.suspended[drafter] = reason
        self._count_usable()

    def resume(self, drafter: str) -> None:
        self.suspended.pop(drafter, None)
        self._count_usable()

    def pin(self, draft_tokens: int | None, drafter: str | None) -> None:
        """Raises ValueError for an unknown drafter, or a length that the engine was not built for."""
        if draft_tokens is None:
            self.pinned = None
            return
        if not 0 <= draft_tokens <= self.settings.max_draft_tokens:
            raise ValueError(f"pin: {draft_tokens} draft tokens; the engine takes 0..{self.settings.max_draft_tokens}")
        if draft_tokens > 0:
            self._known(drafter)
        self.pinned = (draft_tokens, drafter)

    def _count_usable(self) -> None:
        never = self.hot.draft_prefill is DraftPrefill.NEVER
        able = [spec.name not in self.suspended and not (spec.neural and never) for spec in self.settings.drafters]
        self.usable, self.anyone = np.array(able, dtype=bool), any(able)

    def _known(self, drafter: str | None) -> None:
        if drafter not in self.names:
            raise ValueError(f"drafter {drafter!r} is not in the pool {self.names}")


def _tpots_s(hot: HotSettings) -> dict[str | None, float]:
    return {one.name: one.tpot_s for one in hot.slo_classes}
