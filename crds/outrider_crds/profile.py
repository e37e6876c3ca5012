"""The latency profile: what a profiling Job reports, what its ConfigMap holds and what the runtime loads.

One ConfigMap for a target on a product. Its data: `target.json` holds a `TargetProfile`, and each drafter's
`DrafterProfile` stands under `<drafter key>.json`. A Job reports a `ProfilingResult` in its termination message.
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from outrider_crds.base import Model, digest
from outrider_crds.contract import Contract
from outrider_crds.names import Product
from outrider_crds.pod_template import PodTemplate, Resources
from outrider_crds.spec import GPU_RESOURCE, MOST_DRAFTERS, Backend, Drafter, SpeculativeServiceSpec

PROFILE_SCHEMA = 1
TARGET_FILE = "target.json"
TERMINATION_MESSAGE_LIMIT = 4096
REPROFILE_ANNOTATION = "outrider.dev/reprofile"


def _timestamp(value: str) -> str:
    datetime.fromisoformat(value)  # raises ValueError, as pydantic wants it
    return value


Timestamp = Annotated[str, Field(max_length=40), AfterValidator(_timestamp)]
"""RFC 3339, UTC."""
Seconds = Annotated[float, Field(ge=0, lt=1e4, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)] | None
"""Absent in profiles of releases that did not tell."""


class ExecutionMode(StrEnum):
    """How the engine runs a step; each has its own coefficients."""

    UNIFORM = "uniform"
    """Every decoding request carries the same number of tokens (full CUDA graph where there is one)."""
    RAGGED = "ragged"
    """Lengths differ, or a prefill chunk is in the step."""
    BEYOND_GRAPH = "beyondGraph"
    """More tokens than the largest captured graph."""


class StepCost(Model):
    """Seconds of one forward pass (TurboSpec eq. 2, with a knee).

    `a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + l*N_logits + r*n_requests + x*N_context_query + d`.
    `N_context_query` sums context x query length over the requests, divided by 1000; `N_logits` are the batched tokens
    but a prompt's.
    """

    per_context_token_s: Seconds = 0.0
    per_batched_token_s: Seconds = 0.0
    per_batched_token_above_knee_s: Seconds = 0.0
    knee_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """AdaServe's token budget B: from here on the hardware is compute-bound."""
    per_request_s: Seconds = 0.0
    per_context_query_s: Seconds = 0.0
    per_logits_token_s: Seconds = 0.0
    """The model's head and the sampler, for each token that may be sampled from; absent in profiles of releases that
    priced a prompt's tokens alike."""
    constant_s: Seconds = 0.0

    def seconds(self, context: float, batch: int, tokens: int) -> float:
        """Seconds of a step of `batch` requests with `context` cached tokens and `tokens` to sample from each."""
        return self.without_context_s(batch, tokens) + context * self.context_token_s(batch, tokens)

    def without_context_s(self, batch: float, tokens: float) -> float:
        batched = batch * tokens
        return (
            self.constant_s
            + (self.per_batched_token_s + self.per_logits_token_s) * batched
            + self.per_batched_token_above_knee_s * max(0.0, batched - self.knee_tokens)
            + self.per_request_s * batch
        )

    def context_token_s(self, batch: int, tokens: int) -> float:
        """What one more cached token in each of the requests adds."""
        return self.per_context_token_s * batch + self.per_context_query_s * batch * tokens / 1000


LEAST_PASS_S = 1e-9
"""No device is faster; every speed-up divides by what passes take."""


def _takes_time(cost: StepCost) -> StepCost:
    if cost.seconds(context=1, batch=1, tokens=1) < LEAST_PASS_S:
        raise ValueError("a pass takes no time at all")
    return cost


TimedCost = Annotated[StepCost, AfterValidator(_takes_time)]
"""Cost of passes that take time: what no device can do is no measurement."""
Costs = Annotated[dict[ExecutionMode, TimedCost], Field(min_length=1)]


class TargetProfile(Contract):
    schema_version: int = PROFILE_SCHEMA
    key: str
    model: str
    product: str
    device: str = ""
    """The device as the engine names it ("NVIDIA H200", the CPU's model name)."""
    engine_version: str = ""
    commit: str = ""
    """Resolved commit (or content digest) of the weights."""
    costs: Costs
    error_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Median relative error on held-out shapes, those around the crossover included."""
    spread_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Run-to-run spread of one shape; a large one means that the machine was noisy."""
    most_requests: Count = None
    """Requests in the largest batch that was measured."""
    request_tokens: Count = None
    """That a request may take in the engine that was measured."""
    kv_tokens: Count = None
    """That its KV cache holds."""
    measured_at: Timestamp


class DrafterProfile(Contract):
    schema_version: int = PROFILE_SCHEMA
    key: str
    name: str
    """Name of the drafter when it was measured, for people; the key identifies it."""
    cost: TimedCost
    """One draft forward pass: `T_d(N_context, N_batched)`; for prompt lookup constant and per-request terms. A beam's
    later passes are passes over `n_requests * width` tokens."""
    autoregressive: bool
    """True: `K` passes a step (the first over the target's tokens); False: one proposal call."""
    widest: Annotated[int, Field(ge=1)] = 1
    """Nodes at a depth of the widest trees that were measured; absent in profiles of releases that measured chains."""
    first_pass: StepCost = StepCost()
    """What the first pass costs beyond that; absent in profiles of releases that did not measure it."""
    most_requests: Count = None
    """Requests in the largest batch that was measured."""
    budget_tokens: Count = None
    """That a pass reads of each request at most, in whole pages of the engine's KV cache; absent without a window."""
    error_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    commit: str = ""
    measured_at: Timestamp


class ProfilingFailure(Model):
    reason: Annotated[str, Field(max_length=64)]
    """CamelCase: ModelNotFound, VocabularyMismatch, DrafterFailed, Noisy, OutOfMemory, EngineFailed ..."""
    message: Annotated[str, Field(max_length=1024)]
    drafter: str = ""
    """Name of the drafter that failed; empty when the target did."""


class ProfilingResult(Contract):
    """The Job's termination message: what it measured, and what it could not."""

    schema_version: int = PROFILE_SCHEMA
    target: TargetProfile | None = None
    drafters: list[DrafterProfile] = []
    failures: list[ProfilingFailure] = []


_NO_MATTER = re.compile(r"^HF_|^OTEL_|^HUGGING_FACE_|^AWS_|_PROXY$|_CA_BUNDLE$|^SSL_CERT_|TOKEN$", re.IGNORECASE)
"""Variables about downloads, credentials and traces."""
_NO_MATTER_SOURCES = {"secretKeyRef", "fieldRef", "resourceFieldRef"}
Key = Annotated[str, StringConstraints(pattern="^[0-9a-f]{1,64}$")]
"""A digest; names of objects and of files are made of it."""


class ProfileKeys(Model):
    """Keys of one product's measurements, as the operator computes them and pods look them up."""

    product: Product
    target: Key
    drafters: Annotated[dict[str, Key], Field(max_length=2 * MOST_DRAFTERS)]
    """Drafter name -> drafter key."""


def profile_keys(spec: SpeculativeServiceSpec, product: str, image: str) -> ProfileKeys:
    """Keys of `spec`'s target and drafters on `product`; equal settings give equal keys in every service."""
    target = target_key(spec, product, image)
    return ProfileKeys(
        product=product, target=target, drafters={d.name: drafter_key(target, d) for d in spec.draft_pool}
    )


def target_key(spec: SpeculativeServiceSpec, product: str, image: str) -> str:
    """Hash of everything that moves the target's step time on `product`. What is as it was in releases that knew of
    nothing else is left out: their keys hold."""
    return digest({**_settings(spec, product), "image": image})


def settings_key(spec: SpeculativeServiceSpec, product: str) -> str:
    """Hash of the same without the image: profiles that share it differ in nothing but the runtime."""
    return digest(_settings(spec, product))


def _settings(spec: SpeculativeServiceSpec, product: str) -> dict[str, Any]:
    """Everything that moves the target's step time on `product`, except the runtime's image."""
    on_cpu = spec.accelerator.on_cpu
    environment = _environment(spec)
    resource = GPU_RESOURCE if on_cpu else spec.accelerator.resource_name
    return {
        "schema": PROFILE_SCHEMA,
        "model": _without_token(spec.target.wire()),
        "product": product,
        "count": spec.accelerator.count or spec.engine.tensor_parallel_size,
        "tensorParallelSize": spec.engine.tensor_parallel_size,
        "dtype": spec.engine.dtype,
        "maxModelLen": spec.engine.max_model_len,
        "extraArgs": normalised_arguments(spec.engine.extra_args),
        **({} if spec.engine.backend is Backend.VLLM else {"backend": spec.engine.backend}),
        **({} if resource == GPU_RESOURCE else {"resourceName": resource}),
        **({"environment": environment} if environment else {}),
        "limits": _limits(spec.pod_template.resources) if on_cpu else None,
        **_claims(spec.pod_template),
    }


def has_same_meaning_everywhere(spec: SpeculativeServiceSpec) -> bool:
    """True when equal target keys mean equal targets in any two namespaces: the weights come from the hub, and no
    setting refers to an object of the namespace or to a node's folder."""
    variables = (variable.wire() for variable in (*spec.engine.env, *spec.pod_template.env))
    refers = any(_sources(variable) - _NO_MATTER_SOURCES for variable in variables)
    named = [*spec.pod_template.env_from, *_claims(spec.pod_template)]
    return spec.target.source.hub is not None and not refers and not named


def is_drafter_the_same_everywhere(drafter: Drafter) -> bool:
    """True when the drafter has no weights, or has them from the hub."""
    return drafter.neural is None or drafter.neural.model.source.hub is not None


def drafter_key(target: str, drafter: Drafter) -> str:
    """Hash of the target key and the drafter's own settings; its name does not matter, nor whether it is paused."""
    settings = {name: value for name, value in drafter.wire().items() if name not in ("name", "paused")}
    return digest({"target": target, **{name: _without_token_of_model(value) for name, value in settings.items()}})


def normalised_arguments(arguments: list[str]) -> list[str]:
    """`--a=b`, `--a b` and another order are one set of arguments."""
    joined: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not joined or "=" in joined[-1]:
            joined.append(re.sub(r"^(--[A-Za-z0-9_-]+)", lambda m: m[1].replace("_", "-"), argument))
        else:
            joined[-1] = f"{joined[-1]}={argument}"
    return sorted(joined)


def _without_token(model: dict[str, Any]) -> dict[str, Any]:
    """`model` in JSON, without the Secret that it is downloaded with."""
    hub = model.get("source", {}).get("hub")
    if hub is None:
        return model
    return {**model, "source": {"hub": {name: value for name, value in hub.items() if name != "tokenSecretRef"}}}


def _without_token_of_model(block: Any) -> Any:
    """A drafter's block, in JSON."""
    return {**block, "model": _without_token(block["model"])} if isinstance(block, dict) and "model" in block else block


def _sources(variable: dict[str, Any]) -> set[str]:
    """Kinds of source in valueFrom, which Kubernetes has yet to judge."""
    source = variable.get("valueFrom")
    return {*source} if isinstance(source, dict) else set()


def _environment(spec: SpeculativeServiceSpec) -> list[dict[str, Any]]:
    """Variables that may move step times, by name; podTemplate's go before the engine's, as in the container."""
    engine = {variable.name: variable.wire() for variable in spec.engine.env}
    variables = {**engine, **{variable.name: variable.wire() for variable in spec.pod_template.env}}
    kept = [variables[name] for name in sorted(variables) if not _NO_MATTER.search(name)]
    sources = [source.wire() for source in spec.pod_template.env_from]
    return [
        *({"value": "", **variable} for variable in kept if not _sources(variable) & _NO_MATTER_SOURCES),
        *(source for source in sources if "secretRef" not in source),
    ]


def _claims(template: PodTemplate) -> dict[str, Any]:
    """Devices that come by resource claims (DRA): a part of one is another device."""
    used = template.resources.others.get("claims") if template.resources is not None else None
    return {"claims": [used, template.others.get("resourceClaims")]} if used else {}


def _limits(resources: Resources | None) -> dict[str, str]:
    limits = resources.limits if resources is not None else {}
    return {name: str(limits[name]) for name in ("cpu", "memory") if name in limits}
