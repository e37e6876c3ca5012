"""Both pools of a canary in one pod: drafters that are in both are hosted once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from outrider_crds.draft_pool import DrafterSpec, DraftMethod
from outrider_crds.runtime_config import CanaryConfig
from outrider_crds.spec import DraftPrefillMode, SpeculationMode, SpeculativeServiceSpec

_LOOKUPS = (DraftMethod.PROMPT_LOOKUP, DraftMethod.SUFFIX)
"""Methods that run no model; a pod hosts one drafter of each."""
_LONGEST_STEM = 34
"""Characters of a name that "-was" and a number are added to: a name has 40 at most."""


@dataclass(frozen=True)
class Pools:
    hosted: tuple[DrafterSpec, ...]
    """Candidate's drafters in their order, then those that only stable has."""
    stable: tuple[str, ...]
    """Names among `hosted` of the running revision's drafters."""
    candidate: tuple[str, ...]
    """Names among `hosted` of the spec's drafters."""
    lost_revision: str = ""
    """The running revision, where nothing says what its pool is; empty where its ConfigMap does."""

    @property
    def own(self) -> tuple[str, ...]:
        """The candidate's drafters that stable lacks: what they do is the candidate's doing."""
        return tuple(name for name in self.candidate if name not in self.stable)

    @property
    def differ(self) -> bool:
        """Do they draft otherwise? Names and order do not matter."""
        return {*self.stable} != {*self.candidate}

    @property
    def problem(self) -> str:
        """Why no pod can host both, in a sentence; else empty."""
        if self.lost_revision:
            return f"The ConfigMap of revision {self.lost_revision}, which the pods run, is gone, and so is their pool."
        for method in _LOOKUPS:
            drafters = [drafter.name for drafter in self.hosted if drafter.method is method]
            if drafters[1:]:
                return f"A pod hosts one {method} drafter, and the pools have {' and '.join(drafters)}."
        return ""

    def hold(self, spec: SpeculativeServiceSpec) -> str:
        """Why the arms cannot be compared now, in a sentence; else empty. A drafter that proposes nothing makes its
        arm decode as if it were not there, so that any draft is as good as none."""
        if spec.speculation.mode is SpeculationMode.OFF:
            return "speculation.mode is Off."
        if paused := next((drafter.name for drafter in spec.draft_pool if drafter.paused), ""):
            return f"Drafter {paused} is paused."
        own = {*self.own} | ({*self.stable} - {*self.candidate})
        models = [drafter.name for drafter in self.hosted if drafter.name in own and drafter.method not in _LOOKUPS]
        if models and spec.speculation.draft_prefill is DraftPrefillMode.NEVER:
            return f"speculation.draftPrefill is Never, so drafter {models[0]} does not run."
        return ""

    def config(self, attempt: str, candidate_percent: int) -> CanaryConfig:
        return CanaryConfig(
            id=attempt,
            stable=list(self.stable),
            candidate=list(self.candidate),
            candidate_percent=candidate_percent,
        )


def pools_of(stable: Sequence[DrafterSpec], candidate: Sequence[DrafterSpec]) -> Pools:
    """A drafter of `stable` that changed and kept its name is hosted as NAME-was."""
    hosted = [drafter.model_copy(update={"paused": False}) for drafter in candidate]
    names = []
    for drafter in stable:
        shared = next((other for other in hosted if _settings(other) == _settings(drafter)), None)
        if shared is None:
            shared = drafter.model_copy(update={"name": _free_name(drafter.name, hosted), "paused": False})
            hosted.append(shared)
        names.append(shared.name)
    return Pools(tuple(hosted), tuple(dict.fromkeys(names)), tuple(drafter.name for drafter in candidate))


def _settings(drafter: DrafterSpec) -> DrafterSpec:
    """`drafter` without what makes no difference to its proposals."""
    return drafter.model_copy(update={"name": "", "paused": False})


def _free_name(name: str, hosted: Sequence[DrafterSpec]) -> str:
    """`name`, or where that is taken NAME-was, NAME-was2 and so on."""
    taken = {drafter.name for drafter in hosted}
    stem = name[:_LONGEST_STEM].rstrip("-")
    others = (f"{stem}-was{number if number > 1 else ''}" for number in itertools.count(1))
    return next(free for free in itertools.chain([name], others) if free not in taken)
