"""How wrong profiles are where nothing was fitted: MagicDec's L40 and H100 rows, TurboSpec's two H100 points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TextIO

from outrider_runtime.control.costs import DrafterCost, Shape, StepCost
from outrider_runtime.simulate import magicdec
from outrider_runtime.simulate.profile_document import Label
from outrider_runtime.simulate.roofline import (
    DRAFT_OVERHEAD_S,
    TARGET_OVERHEAD_S,
    derived_cost,
    devices,
    models,
)

TargetCost = Callable[[str, str, int], StepCost]
"""(model, device, GPUs) -> the cost of one pass."""
FITTED_DEVICE = "a100"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One held-out figure, measured by a paper and predicted here."""

    label: Label
    """Of the profile that predicts."""
    paper: str
    device: str
    point: str
    what: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


def judge() -> list[Judgement]:
    """Every held-out figure against every kind of profile that claims to predict it."""
    return [
        *_magicdec_targets(Label.FITTED, carried_cost),
        *_magicdec_targets(Label.DERIVED, _target_cost),
        *_magicdec_drafts(),
        *_turbospec(),
    ]


def carried_cost(model: str, device: str, gpus: int) -> StepCost:
    """The A100 fit on other GPUs: reading scales with bandwidth, computing with throughput, the rest stays."""
    fitted, here, there = magicdec.fit_target(model).cost, devices()[FITTED_DEVICE], devices()[device]
    memory = magicdec.GPUS * here.bandwidth_tb_s / (gpus * there.bandwidth_tb_s)
    compute = magicdec.GPUS * here.tflops / (gpus * there.tflops)
    weights_s = models()[model].weight_bytes / (magicdec.GPUS * here.bytes_per_s)
    return dataclasses.replace(
        fitted,
        per_context_token_s=memory * fitted.per_context_token_s,
        per_batched_token_s=compute * fitted.per_batched_token_s,
        per_batched_token_above_knee_s=compute * fitted.per_batched_token_above_knee_s,
        per_context_query_s=compute * fitted.per_context_query_s,
        per_logits_token_s=compute * fitted.per_logits_token_s,
        constant_s=fitted.constant_s + (memory - 1) * weights_s,
    )


def _target_cost(model: str, device: str, gpus: int) -> StepCost:
    return derived_cost(models()[model], devices()[device], gpus, TARGET_OVERHEAD_S)


def _draft_cost(model: str, device: str, gpus: int) -> StepCost:
    return derived_cost(models()[model], devices()[device], gpus, DRAFT_OVERHEAD_S)


def _magicdec_targets(label: Label, cost_of: TargetCost) -> Iterator[Judgement]:
    seen: set[tuple[str, str, float]] = set()  # rows that differ in the draft alone repeat the target's decode time
    for row in magicdec.table("magicdec_table2.csv"):
        cost = cost_of(row["target"], row["device"], int(row["gpus"]))
        for what, query in (("decode", 1), ("verify", int(row["gamma"]) + 1)):
            shape = magicdec.decode_shape(int(row["batch"]), int(row["prefill"]), query)
            point, text = _point(row), row[f"{what}_ms"]
            key = (point, what, float(text or 0))
            if text and key not in seen:
                seen.add(key)
                yield Judgement(label, "MagicDec", row["device"], point, what, float(text), 1e3 * cost.seconds(shape))


def _magicdec_drafts() -> Iterator[Judgement]:
    for row in magicdec.table("magicdec_table2.csv"):
        model = row["target"] if row["draft"] == "self" else row["draft"]
        cost = _draft_cost(model, row["device"], int(row["gpus"]))
        batch, gamma = int(row["batch"]), int(row["gamma"])
        predicted_s = gamma * cost.seconds(magicdec.decode_shape(batch, int(row["budget"]), 1))
        point = f"{_point(row)}, {row['draft']} x {gamma}"
        yield Judgement(
            Label.DERIVED, "MagicDec", row["device"], point, "draft", float(row["draft_ms"]), 1e3 * predicted_s
        )


def _turbospec() -> Iterator[Judgement]:
    for row in magicdec.table("turbospec_figure2.csv"):
        batch, context, draft_tokens = (int(row[column]) for column in ("batch", "context", "draft_tokens"))
        shape = magicdec.decode_shape(batch, context, draft_tokens + 1)
        seconds = _target_cost(row["target"], row["device"], int(row["gpus"])).seconds(shape)
        if draft_tokens:
            draft = DrafterCost(_draft_cost(row["draft"], row["device"], 1))
            seconds += draft.seconds(Shape(batch * context, batch * (draft_tokens + 1), batch), draft_tokens)
        yield Judgement(
            Label.DERIVED, "TurboSpec", row["device"], f"{row['target']}, batch {batch}", f"step, k = {draft_tokens}",
            float(row["step_ms"]), 1e3 * seconds,
        )  # fmt: skip


def _point(row: dict[str, str]) -> str:
    return f"{row['target']}, context {row['prefill']}, batch {row['batch']}"


def print_judgements(judgements: Sequence[Judgement], out: TextIO) -> None:
    """Each figure, then the median error by label, paper and device; what was fitted, with its own error, first."""
    for target in ("llama-2-7b", "llama-3.1-8b"):
        fitted = magicdec.fit_target(target)
        out.write(f"fitted: {target} on 8 x A100 ({fitted.form.value} form): error {fitted.error:.1%} on the quarter ")
        out.write("of MagicDec's Table 1 that was kept out of the fit\n")
    out.write(
        f"\n{'profile':<8} {'held out':<16} {'point':<52} {'what':<12} {'measured':>9} {'predicted':>9} {'error':>7}\n"
    )
    for one in judgements:
        out.write(
            f"{one.label:<8} {one.paper + ', ' + one.device:<16} {one.point:<52} {one.what:<12} "
            f"{one.measured_ms:>6.2f} ms {one.predicted_ms:>6.2f} ms {one.predicted_ms / one.measured_ms - 1:>+7.1%}\n"
        )
    out.write("\nmedian absolute error on what was held out\n")
    out.writelines(f"  {line}\n" for line in summary_lines(judgements))


def summary_lines(judgements: Sequence[Judgement]) -> Iterator[str]:
    for (label, paper, device, part), errors in median_errors(judgements).items():
        spread = f"(worst {max(errors):.0%}, {len(errors)} points)"
        yield f"{label:<8} {paper}, {device}, {part}: {median(errors):.0%} {spread}"


def median_errors(judgements: Sequence[Judgement]) -> dict[tuple[Label, str, str, str], list[float]]:
    groups: dict[tuple[Label, str, str, str], list[float]] = {}
    for one in judgements:
        part = "draft" if one.what == "draft" else "target" if one.paper == "MagicDec" else "whole step"
        groups.setdefault((one.label, one.paper, one.device, part), []).append(one.error)
    return groups
