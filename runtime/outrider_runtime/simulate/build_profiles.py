"""Writes the shipped profiles from a measurement, papers and data sheets; a test runs it again and compares.

python -m outrider_runtime.simulate.build_profiles
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from outrider_crds.profile import ExecutionMode, ProfilingResult
from outrider_crds.spec import DraftMethod

from outrider_runtime.control.costs import StepCost
from outrider_runtime.control.fit import Fit
from outrider_runtime.simulate import magicdec, roofline
from outrider_runtime.simulate.data import data_text
from outrider_runtime.simulate.profile_document import DrafterProfile, Label, SimulationProfile, profile_cost
from outrider_runtime.simulate.profiles import FOLDER, measured

MODE = ExecutionMode.RAGGED
"""One set of coefficients stands for every mode: neither source tells them apart."""
LOOKUP = StepCost(constant_s=2e-4, per_request_s=2e-5)
"""A prompt lookup on the CPU; assumed, as neither source has one."""
FITTED = {"llama-2-7b": "tinyllama-1.1b", "llama-3.1-8b": "self"}
"""Target -> its draft in MagicDec's Table 1."""


MEASURED = {"smollm2-135m-cpu": "smollm2_cpu_result.json"}
"""Name -> the ProfilingResult that outrider-profile wrote."""
MEASURED_METHODS = {"eagle": DraftMethod.EAGLE, "lookup": DraftMethod.PROMPT_LOOKUP}
SMOLLM2_KV_TOKENS = 45_000
"""In the 1 GiB that examples/smollm2-cpu.yaml sets aside."""


def shipped() -> Iterator[SimulationProfile]:
    for name, file in MEASURED.items():
        yield _measured(name, ProfilingResult.model_validate_json(data_text(file)))
    for target, draft in FITTED.items():
        yield _fitted(target, draft)
    for name, fields in roofline.document("derived.yaml").items():
        yield _derived(name, **fields)


def _measured(name: str, result: ProfilingResult) -> SimulationProfile:
    """Its drafters stand for any of their method."""
    assert result.target is not None
    profile = measured(name, result.target, result.drafters)
    drafters = [
        drafter.model_copy(update={"name": "", "model": drafter.name, "method": MEASURED_METHODS[drafter.name]})
        for drafter in profile.drafters
    ]
    source = f"{profile.source}, on two cores that others used too (docs/latency-model.md, run C)"
    update = {"drafters": drafters, "kv_tokens": SMOLLM2_KV_TOKENS, "source": source}
    return profile.model_copy(update=update)


def _fitted(target: str, draft: str) -> SimulationProfile:
    fitted, drafted = magicdec.fit_target(target), magicdec.fit_draft(target, draft)
    device = roofline.devices()["a100"]
    return SimulationProfile(
        name=f"{target}-8xa100",
        label=Label.FITTED,
        source=f"MagicDec Table 1, GPT-Fast with tensor parallelism 8: {_quality(fitted)}, draft {_quality(drafted)}; "
        "contexts from 1000 to 100000 tokens and batches from 32 to 256, prompts extrapolated; prompt lookup assumed",
        device=device.name,
        gpus=magicdec.GPUS,
        target=target,
        costs={MODE: profile_cost(fitted.cost)},
        drafters=[_drafter(DraftMethod.DRAFT_MODEL, _draft_name(target, draft), drafted.cost), _lookup()],
        kv_tokens=roofline.kv_tokens(roofline.models()[target], device, magicdec.GPUS),
    )


def _quality(fitted: Fit) -> str:
    return f"error {fitted.error:.1%} on the quarter of the rows kept out of the fit"


def _draft_name(target: str, draft: str) -> str:
    window = f"window of {magicdec.BUDGET_TOKENS} tokens"
    return f"{target if draft == 'self' else draft} ({window})"


def _derived(
    name: str, *, target: str, device: str, gpus: int, drafters: dict[str, str], batch_expansion: bool = False
) -> SimulationProfile:
    models, hardware = roofline.models(), roofline.devices()[device]
    cost = roofline.derived_cost(
        models[target], hardware, gpus, roofline.TARGET_OVERHEAD_S, batch_expansion=batch_expansion
    )
    source = "weights, KV bytes and FLOPs against the data sheet; prompt lookup assumed"
    if batch_expansion:
        source += "; every verified token reads its context again (batch expansion, vLLM's first engine)"
    return SimulationProfile(
        name=name,
        label=Label.DERIVED,
        source=source,
        device=hardware.name,
        gpus=gpus,
        target=target,
        costs={MODE: profile_cost(cost)},
        drafters=[*(_derived_drafter(method, model, hardware) for method, model in drafters.items()), _lookup()],
        kv_tokens=roofline.kv_tokens(models[target], hardware, gpus),
    )


def _derived_drafter(method: str, model: str, device: roofline.Device) -> DrafterProfile:
    """On one GPU, however many the target has."""
    cost = roofline.derived_cost(roofline.models()[model], device, 1, roofline.DRAFT_OVERHEAD_S)
    return _drafter(DraftMethod(method), model, cost)


def _drafter(method: DraftMethod, model: str, cost: StepCost) -> DrafterProfile:
    return DrafterProfile(method=method, model=model, cost=profile_cost(cost), autoregressive=True)


def _lookup() -> DrafterProfile:
    return DrafterProfile(method=DraftMethod.PROMPT_LOOKUP, cost=profile_cost(LOOKUP), autoregressive=False)


def as_yaml(profile: SimulationProfile) -> str:
    """Without the coefficients that are 0, and the texts and groups that are empty."""
    text: str = yaml.safe_dump(_without_zeros(profile.wire()), sort_keys=False, width=118, allow_unicode=True)
    return f"# Written by outrider_runtime.simulate.build_profiles; seconds throughout.\n{text}"


def _without_zeros(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_zeros(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is False or item not in ("", 0, {})}
    return [_without_zeros(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    for profile in shipped():
        (FOLDER / f"{profile.name}.yaml").write_text(as_yaml(profile), encoding="utf-8")


if __name__ == "__main__":
    main()
