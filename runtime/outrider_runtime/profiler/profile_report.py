"""Reports a profile to a user: as a table on the terminal, and as JSON and a plot in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from outrider_crds.long_contexts import ACCEPTED, SelfDraft

from outrider_runtime.control.step_times import StepCost
from outrider_runtime.profiler.documents import held_out_percent
from outrider_runtime.profiler.fitting import FittedCost, JudgedShape
from outrider_runtime.profiler.run import Profile

_TERMS = {
    "constant_s": "constant",
    "per_batched_token_s": "per batched token",
    "per_batched_token_above_knee_s": "... above the knee",
    "per_logits_token_s": "... with logits (not prompts)",
    "per_context_token_s": "per 1000 context tokens",
    "per_request_s": "per request",
    "per_context_query_s": "per 1000 context x query",
}
_THOUSANDS = {"per_context_token_s"}


def print_report(profile: Profile, out: TextIO) -> None:
    """Print coefficients, the held-out error, and the measured and predicted time of each shape."""
    for title, fitted in _fits(profile).items():
        out.write(f"\n{title} ({fitted.form.value} form), held-out error {held_out_percent([fitted]):.1f}%\n")
        out.writelines(f"  {line}\n" for line in _coefficients(fitted.cost))
        out.writelines(f"  {line}\n" for line in _table(fitted.judged))
    target = profile.target
    if target is not None:
        out.write(f"\ntarget {target.model} on {target.device}: held-out error {target.error_percent:.1f}%, ")
        out.write(f"run-to-run spread {target.spread_percent:.1f}%, measured in {profile.measured_s:.0f} s\n")
    for name, draft in profile.self_drafts().items():
        out.write(f"\ndrafter {name}, with {ACCEPTED:.0%} of its proposals accepted: {_where_it_pays(draft)}\n")
    for failure in profile.failures:
        out.write(f"\nnot measured: {failure.drafter or 'target'}: {failure.reason}: {failure.message}\n")


def _where_it_pays(draft: SelfDraft) -> str:
    """Describe from which context on the drafter makes decoding faster."""
    break_even = [f"with {_requests(batch)} {_context_text(draft.break_even_tokens(batch))}" for batch in draft.batches]
    inflection = draft.inflection_tokens()
    batch_gain = f"; a larger batch gains more {_context_text(inflection)}" if inflection is not None else ""
    return f"pays {', '.join(break_even)}{batch_gain}"


def _requests(batch: int) -> str:
    return f"{batch} request" if batch == 1 else f"{batch} requests"


def _context_text(tokens: int | None) -> str:
    if tokens is None:
        return "at no context within reach"
    return f"from {tokens:,} tokens on" if tokens else "at any context"


def write_report(profile: Profile, folder: Path) -> None:
    """Write `report.json`, and `report.png` if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(as_json(profile), indent=2) + "\n", encoding="utf-8")
    fits = _fits(profile)
    if fits:
        _plot(fits, folder / "report.png")


def as_json(profile: Profile) -> dict[str, Any]:
    """Return the content of `report.json`."""
    fits = {title: [_row(judged) for judged in fitted.judged] for title, fitted in _fits(profile).items()}
    long_contexts = {
        name: {
            "breakEvenTokens": {str(batch): draft.break_even_tokens(batch) for batch in draft.batches},
            "inflectionTokens": draft.inflection_tokens(),
        }
        for name, draft in profile.self_drafts().items()
    }
    return {
        "result": profile.result().wire(), "measuredSeconds": round(profile.measured_s, 1), "shapes": fits,
        "longContexts": long_contexts,
    }  # fmt: skip


def _fits(profile: Profile) -> Mapping[str, FittedCost]:
    target = {f"target, {mode.value} steps": fitted for mode, fitted in profile.fitted_target.items()}
    return target | {f"drafter {name}": fitted for name, fitted in profile.fitted_drafters.items()}


def _coefficients(cost: StepCost) -> Iterable[str]:
    for name, label in _TERMS.items():
        value = getattr(cost, name) * (1000 if name in _THOUSANDS else 1)
        if value:
            knee = f" ({cost.knee_tokens:.0f} tokens)" if "knee" in name else ""
            yield f"{label:<26} {value * 1e3:10.4f} ms{knee}"


def _table(judged: Iterable[JudgedShape]) -> Iterable[str]:
    yield f"{'shape':<58} {'measured':>10} {'predicted':>10} {'error':>7} {'spread':>7}"
    for shape in sorted(judged, key=lambda j: j.measurement.point):
        measurement = shape.measurement
        name = f"{measurement.point}" + (f"  K {measurement.draft_tokens}" if measurement.draft_tokens else "")
        yield (
            f"{name:<58} {measurement.seconds * 1e3:7.2f} ms {shape.predicted_s * 1e3:7.2f} ms {shape.error:>7.1%} "
            f"{'once' if math.isnan(measurement.spread) else format(measurement.spread, '.1%'):>7}"
            f"{'  held out' if shape.held_out else ''}"
        )


def _row(judged: JudgedShape) -> dict[str, Any]:
    measurement = judged.measurement
    shape = measurement.shape
    return {
        "batch": measurement.point.batch,
        "context": measurement.point.context,
        "verify": measurement.point.verify,
        "uneven": measurement.point.uneven,
        "prefill": measurement.point.prefill,
        "draftTokens": measurement.draft_tokens,
        "draftWidth": measurement.draft_width,
        "contextTokens": shape.n_context,
        "batchedTokens": shape.n_batched,
        "measuredMs": round(measurement.seconds * 1e3, 4),
        "predictedMs": round(judged.predicted_s * 1e3, 4),
        "errorPercent": round(judged.error * 100, 2),
        "spreadPercent": None if math.isnan(measurement.spread) else round(measurement.spread * 100, 2),
        "heldOut": judged.held_out,
    }


def _plot(fits: Mapping[str, FittedCost], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:  # not part of the runtime image
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(fits), figsize=(5 * len(fits), 4.5), squeeze=False)
    for axis, (title, fitted) in zip(axes[0], fits.items(), strict=True):
        _scatter(axis, title, fitted)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _scatter(axis: Any, title: str, fitted: FittedCost) -> None:
    """Plot predicted against measured times; the model is right on the diagonal."""
    longest = max(judged.measurement.seconds for judged in fitted.judged) * 1e3
    axis.plot([0, longest], [0, longest], color="grey", linewidth=0.8)
    for held_out, label, marker in ((False, "fitted", "o"), (True, "held out", "x")):
        chosen = [judged for judged in fitted.judged if judged.held_out is held_out]
        axis.scatter(
            [judged.measurement.seconds * 1e3 for judged in chosen],
            [judged.predicted_s * 1e3 for judged in chosen],
            marker=marker, label=label,
        )  # fmt: skip
    axis.set(
        title=f"{title}\nheld-out error {held_out_percent([fitted]):.1f}%", xlabel="measured ms", ylabel="predicted ms"
    )
    axis.legend()
