"""What the command line says about acceptance and SLO classes, and what is assumed where it says nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from outrider_crds.base import seconds
from outrider_crds.spec import DraftMethod

from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.pod import Pod
from outrider_runtime.simulate.truth import AcceptanceRule

DEFAULT_ACCEPTANCE = {DraftMethod.PROMPT_LOOKUP: 0.6, DraftMethod.SUFFIX: 0.6}
OTHER_ACCEPTANCE = 0.7
"""TurboSpec, section 3: typical for Llama models. Its Table 3: 0.53 to 0.92 with drafts, 0.54 to 0.83 with lookup."""
DEFAULT_HIT_RATE = 0.4
"""How often a drafter without a model finds anything; assumed."""

_ACCEPTANCE = re.compile(r"(?P<drafter>[^/@=]+)(/(?P<slo_class>[^/@=]+))?(@(?P<start>[^/@=]+))?=(?P<hazards>[^=]+)")


@dataclass(frozen=True, slots=True)
class Acceptance:
    rules: tuple[AcceptanceRule, ...]
    hit_rates: dict[str, float]
    """Of drafters without weights."""
    assumed: tuple[str, ...]
    """Drafters of which nothing was said."""

    def lines(self) -> Iterator[str]:
        for rule in self.rules:
            where = f" for class {rule.slo_class}" if rule.slo_class else ""
            since = f" from {rule.from_s:g} s on" if rule.from_s else ""
            hazards = ", ".join(f"{hazard:.2f}" for hazard in rule.hazards)
            found = self.hit_rates.get(rule.drafter)
            hits = f", proposes for {found:.0%} of the requests" if found is not None else ""
            assumed = " (assumed; see --acceptance)" if rule.drafter in self.assumed else ""
            yield f"{rule.drafter} accepts {hazards} a position{where}{since}{hits}{assumed}"


def read_acceptance(pod: Pod, acceptance: Sequence[str], hit_rates: Sequence[str]) -> Acceptance:
    """`DRAFTER[/CLASS][@TIME]=A[,A...]` and `DRAFTER=SHARE`. Raises SimulationError naming the option and its text."""
    given = [_rule(pod, text) for text in acceptance]
    said = {rule.drafter for rule in given if rule.slo_class is None and rule.from_s == 0}
    assumed = [drafter for drafter in pod.drafters if drafter.name not in said]
    defaults = [
        AcceptanceRule(drafter.name, (DEFAULT_ACCEPTANCE.get(drafter.method, OTHER_ACCEPTANCE),)) for drafter in assumed
    ]
    hits = {drafter.name: DEFAULT_HIT_RATE for drafter in pod.drafters if drafter.neural is None}
    hits |= _pairs("--hit-rate", hit_rates, hits, lambda text: _share("--hit-rate", text))
    return Acceptance((*defaults, *given), hits, tuple(drafter.name for drafter in assumed))


def _rule(pod: Pod, text: str) -> AcceptanceRule:
    match = _ACCEPTANCE.fullmatch(text)
    if match is None:
        raise SimulationError(
            f"--acceptance {text}: write DRAFTER=0.7, DRAFTER/CLASS=0.8,0.6 or DRAFTER@60s=0.4 (from 60 s on)"
        )
    _one_of("--acceptance", "drafter", match["drafter"], [drafter.name for drafter in pod.drafters])
    if match["slo_class"]:
        _one_of("--acceptance", "SLO class", match["slo_class"], [one.name for one in pod.hot.slo_classes])
    try:
        start_s = seconds(match["start"]) if match["start"] else 0.0
    except ValueError as error:
        raise SimulationError(f"--acceptance {text}: {error}") from error
    hazards = tuple(_share("--acceptance", part) for part in match["hazards"].split(","))
    return AcceptanceRule(match["drafter"], hazards, match["slo_class"], start_s)


def read_mix(pod: Pod, mix: str | None) -> dict[str, float]:
    """`CLASS=WEIGHT,...`; without it every request is of the default class. Raises SimulationError."""
    names = [one.name for one in pod.hot.slo_classes]
    if mix is None:
        default = pod.hot.default_slo_class
        return {default: 1.0} if default is not None else {}
    weights = _pairs("--mix", mix.split(","), names, _weight)
    if sum(weights.values()) <= 0:
        raise SimulationError(f"--mix {mix}: the weights add up to nothing")
    return weights


def _pairs(
    option: str, texts: Iterable[str], known: Iterable[str], value_of: Callable[[str], float]
) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SimulationError(f"{option} {text}: write NAME=NUMBER")
        _one_of(option, "name", name, list(known))
        pairs[name] = value_of(value)
    return pairs


def _one_of(option: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise SimulationError(f"{option}: {what} {name!r} is not in the manifest; it has {', '.join(known) or 'none'}")


def _share(option: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SimulationError(f"{option}: {text!r} is not a probability from 0 to 1")
    return share


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < 1e9:
        raise SimulationError(f"--mix: {text!r} is not a weight of 0 or more")
    return weight
