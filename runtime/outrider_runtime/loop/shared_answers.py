"""Which finished answers suffix drafters of a wider scope may propose from, and for which requests.

The scheduler decides it, and sends it with a step's order. So all ranks keep the same answers, and erase them at the
same step, whatever their clocks say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from outrider_crds.draft_pool import DrafterSpec, SuffixScope

from outrider_runtime.drafters.kept_answers import NO_OWNER, KeptAnswer
from outrider_runtime.drafters.suffix import TENANT_ARGUMENT, sharing_scope

_SERVICE = 0
"""Owner of all answers of a service."""


class SharedAnswers(NamedTuple):
    """Scheduler to drafters, with each step."""

    now_s: float
    owners: npt.NDArray[np.int64]
    """(requests,): see `KeptAnswer.owner`; `NO_OWNER`: the request shares with no other."""
    finished: tuple[KeptAnswer, ...] = ()
    """Answers that were completed since the last step."""


def answer_owner(scope: SuffixScope, adapter: str | None, extra_args: Mapping[str, object] | None) -> int:
    """Return the owner of a request's answer. adapter: name of its LoRA adapter."""
    if scope is SuffixScope.SERVICE:
        return _SERVICE
    if scope is SuffixScope.ADAPTER:
        return _number(adapter or "")
    tenant = (extra_args or {}).get(TENANT_ARGUMENT)
    return _number(tenant) if scope is SuffixScope.TENANT and isinstance(tenant, str) else NO_OWNER


def _number(name: str) -> int:
    """Return 63 bits of a hash: that two names share them is less likely than a defect of the memory."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


class AnswerSharing:
    """The answers of one engine's requests. It is empty unless a drafter has a wider scope."""

    def __init__(self, hosted: Sequence[DrafterSpec]) -> None:
        self._scope = sharing_scope(hosted)
        self._owners: dict[str, int] = {}
        self._finished: list[KeptAnswer] = []

    def register(self, name: str, adapter: str | None, extra_args: Mapping[str, object] | None) -> None:
        """Add a request. Call it only for one whose prompt is text."""
        if self._scope is not None:
            self._owners[name] = answer_owner(self._scope, adapter, extra_args)

    def note_end(self, name: str, answer: Sequence[int] | None, now_s: float) -> None:
        """Remove a request. answer: its tokens; None if it is not complete."""
        owner = self._owners.pop(name, NO_OWNER)
        if owner != NO_OWNER and answer:
            self._finished.append(KeptAnswer(owner, np.array(answer, np.int32), now_s))

    def take(self, names: Sequence[str], now_s: float) -> SharedAnswers | None:
        """Return what a step's drafters need; None without a wider scope. names: the step's requests."""
        if self._scope is None:
            return None
        finished, self._finished = tuple(self._finished), []
        owners = np.array([self._owners.get(name, NO_OWNER) for name in names], np.int64)
        return SharedAnswers(now_s, owners, finished)
