"""The latency profile: a profiling Job reports it, a ConfigMap stores it, and the runtime loads it.

There is one ConfigMap for a target on a product. Its file `target.json` is a `TargetProfile`, and `<drafter key>.json`
a `DrafterProfile`. A Job reports a `ProfilingResult` in its termination message.
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from outrider_crds.base import Model, digest
from outrider_crds.contract import Contract
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.lora_adapters import Lora
from outrider_crds.names import Product
from outrider_crds.pod_template import PodTemplate, Resources
from outrider_crds.spec import GPU_RESOURCE, MOST_DRAFTERS, Backend, SpeculativeServiceSpec

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
"""A count; None in profiles of older releases."""


class ProfileExecutionMode(StrEnum):
    """Ways in which the engine runs a step. Each has its own coefficients."""

    UNIFORM = "uniform"
    """Every decoding request has the same number of tokens (full CUDA graph, if there is one)."""
    VARLEN = "ragged"
    """Requests have different numbers of tokens, or the step has a prefill chunk."""
    BEYOND_GRAPH = "beyondGraph"
    """The step has more tokens than the largest captured graph."""


class ProfileStepCost(Model):
    """Coefficients for the seconds of one forward pass (TurboSpec eq. 2, with a knee).

    `a*N_context + g1*N_batched + g2*max(0, N_batched - knee) + l*N_logits + r*n_requests + x*N_context_query + d`.
    `N_context_query` is the sum of context x query length over the requests, divided by 1000. `N_logits` is the number
    of batched tokens without those of prompts.
    """

    per_context_token_s: Seconds = 0.0
    per_batched_token_s: Seconds = 0.0
    per_batched_token_above_knee_s: Seconds = 0.0
    knee_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Batched tokens above which the hardware is compute-bound (AdaServe's token budget B)."""
    per_request_s: Seconds = 0.0
    per_context_query_s: Seconds = 0.0
    per_logits_token_s: Seconds = 0.0
    """Seconds of the model's head and the sampler per token that may be sampled; 0 in profiles of older releases."""
    constant_s: Seconds = 0.0

    def seconds(self, context: float, batch: int, tokens: int) -> float:
        """Seconds of a step of `batch` requests, each with `context` cached tokens and `tokens` to sample."""
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
        """Seconds that one more cached token in each request adds."""
        return self.per_context_token_s * batch + self.per_context_query_s * batch * tokens / 1000


LEAST_PASS_S = 1e-9
"""Shortest credible pass, which no device beats: speed-ups divide by the time of passes."""


def _takes_time(cost: ProfileStepCost) -> ProfileStepCost:
    if cost.seconds(context=1, batch=1, tokens=1) < LEAST_PASS_S:
        raise ValueError("a pass takes no time at all")
    return cost


TimedCost = Annotated[ProfileStepCost, AfterValidator(_takes_time)]
"""Cost of passes that take a credible time."""
Costs = Annotated[dict[ProfileExecutionMode, TimedCost], Field(min_length=1)]


class TargetProfile(Contract):
    schema_version: int = PROFILE_SCHEMA
    key: str
    model: str
    product: str
    device: str = ""
    """Name of the device in the engine ("NVIDIA H200", the CPU's model name)."""
    engine_version: str = ""
    commit: str = ""
    """Resolved commit (or content digest) of the weights."""
    costs: Costs
    error_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Median relative error on held-out shapes, including those around the crossover."""
    spread_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Run-to-run spread of one shape. A large one means that the machine was noisy."""
    most_requests: Count = None
    """Requests in the largest batch that was measured."""
    request_tokens: Count = None
    """Longest request of the engine that was measured, in tokens."""
    kv_tokens: Count = None
    """Tokens in the KV cache of the engine that was measured."""
    measured_at: Timestamp


class DrafterProfile(Contract):
    schema_version: int = PROFILE_SCHEMA
    key: str
    name: str
    """Name of the drafter when it was measured, for people. The key identifies it."""
    cost: TimedCost
    """Cost of one draft forward pass, `T_d(N_context, N_batched)`. Prompt lookup has only constant and per-request
    terms. Later passes of a beam are passes over `n_requests * width` tokens."""
    autoregressive: bool
    """True: `K` passes per step, the first over the target's tokens. False: one proposal call per step."""
    widest: Annotated[int, Field(ge=1)] = 1
    """Nodes per depth of the widest trees that were measured; 1 in profiles of releases that measured chains."""
    first_pass: ProfileStepCost = ProfileStepCost()
    """Additional cost of the first pass, and of a block drafter the cost of feeding; zero in profiles of releases that
    did not measure it."""
    most_requests: Count = None
    """Requests in the largest batch that was measured."""
    budget_tokens: Count = None
    """Most tokens of a request that a pass reads, in whole pages of the KV cache; None without a window."""
    error_percent: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    commit: str = ""
    measured_at: Timestamp


class ProfilingFailure(Model):
    reason: Annotated[str, Field(max_length=64)]
    """CamelCase: ModelNotFound, VocabularyMismatch, DrafterFailed, Noisy, OutOfMemory, EngineFailed ..."""
    message: Annotated[str, Field(max_length=1024)]
    drafter: str = ""
    """Name of the drafter that failed; empty if the target did."""


class ProfilingResult(Contract):
    """The Job's termination message: measurements and failures."""

    schema_version: int = PROFILE_SCHEMA
    target: TargetProfile | None = None
    drafters: list[DrafterProfile] = []
    failures: list[ProfilingFailure] = []


_NO_MATTER = re.compile(r"^HF_|^OTEL_|^HUGGING_FACE_|^AWS_|_PROXY$|_CA_BUNDLE$|^SSL_CERT_|TOKEN$", re.IGNORECASE)
"""Variables about downloads, credentials and traces."""
_NO_MATTER_SOURCES = {"secretKeyRef", "fieldRef", "resourceFieldRef"}
Key = Annotated[str, StringConstraints(pattern="^[0-9a-f]{1,64}$")]
"""A digest, which is part of names of objects and files."""


class ProfileKeys(Model):
    """Keys of one product's measurements, as the operator computes them and pods look them up."""

    product: Product
    target: Key
    drafters: Annotated[dict[str, Key], Field(max_length=2 * MOST_DRAFTERS)]
    """Drafter name -> drafter key."""


def profile_keys(spec: SpeculativeServiceSpec, product: str, image: str) -> ProfileKeys:
    """Keys of `spec`'s target and drafters on `product`. Equal settings have equal keys in every service."""
    target = target_key(spec, product, image)
    return ProfileKeys(
        product=product, target=target, drafters={d.name: drafter_key(target, d) for d in spec.draft_pool}
    )


def target_key(spec: SpeculativeServiceSpec, product: str, image: str) -> str:
    """Hash of everything that affects the target's step time on `product`.

    Values that older releases did not know are left out while they have their default, so that old keys stay valid.
    """
    return digest({**_settings(spec, product), "image": image})


def settings_key(spec: SpeculativeServiceSpec, product: str) -> str:
    """Hash of the same settings without the image. Profiles with equal hashes differ only in the runtime."""
    return digest(_settings(spec, product))


def _settings(spec: SpeculativeServiceSpec, product: str) -> dict[str, Any]:
    """Everything that affects the target's step time on `product`, except the runtime's image."""
    on_cpu = spec.accelerator.on_cpu
    environment = _environment(spec)
    resource = GPU_RESOURCE if on_cpu else spec.accelerator.resource_name
    return {
        "schema": PROFILE_SCHEMA,
        "model": _without_token(spec.target.wire()),
        "product": product,
        "count": spec.accelerator.count or spec.engine.tensor_parallel_size // spec.engine.nodes,
        "tensorParallelSize": spec.engine.tensor_parallel_size,
        "dtype": spec.engine.dtype,
        "maxModelLen": spec.engine.max_model_len,
        "extraArgs": normalised_arguments(spec.engine.extra_args),
        **({} if spec.engine.backend is Backend.VLLM else {"backend": spec.engine.backend}),
        **({} if spec.engine.lora is None else {"lora": _lora(spec.engine.lora)}),
        **({} if resource == GPU_RESOURCE else {"resourceName": resource}),
        **({"environment": environment} if environment else {}),
        "limits": _limits(spec.pod_template.resources) if on_cpu else None,
        **_claims(spec.pod_template),
    }


def _lora(lora: Lora) -> dict[str, int]:
    """Room for adapters. Which adapters there are, and where they are from, is hot."""
    return {"maxAdapters": lora.max_adapters, "maxRank": lora.max_rank}


def has_same_meaning_everywhere(spec: SpeculativeServiceSpec) -> bool:
    """True if equal target keys mean equal targets in all namespaces.

    The weights must come from the hub, and no setting may refer to an object of the namespace or a node's folder.
    """
    variables = (variable.wire() for variable in (*spec.engine.env, *spec.pod_template.env))
    refers = any(_sources(variable) - _NO_MATTER_SOURCES for variable in variables)
    named = [*spec.pod_template.env_from, *_claims(spec.pod_template)]
    return spec.target.source.hub is not None and not refers and not named


def is_drafter_the_same_everywhere(drafter: DrafterSpec) -> bool:
    """True if the drafter has no weights, or gets them from the hub."""
    return drafter.neural is None or drafter.neural.model.source.hub is not None


def drafter_key(target: str, drafter: DrafterSpec) -> str:
    """Hash of the target key and the drafter's settings, without its name and `paused`."""
    settings = {name: value for name, value in drafter.wire().items() if name not in ("name", "paused")}
    return digest({"target": target, **{name: _without_token_of_model(value) for name, value in settings.items()}})


def normalised_arguments(arguments: list[str]) -> list[str]:
    """The arguments in one form: `--a=b`, `--a b` and any order are equal, as are `-O3` and its long form."""
    joined: list[str] = []
    for argument in (re.sub("^-O([0-3])$", r"--optimization-level=\1", argument) for argument in arguments):
        if argument.startswith("--") or not joined or "=" in joined[-1]:
            joined.append(re.sub(r"^(--[A-Za-z0-9_-]+)", lambda m: m[1].replace("_", "-"), argument))
        else:
            joined[-1] = f"{joined[-1]}={argument}"
    return sorted(joined)


def _without_token(model: dict[str, Any]) -> dict[str, Any]:
    """`model` in JSON without its token Secret."""
    hub = model.get("source", {}).get("hub")
    if hub is None:
        return model
    return {**model, "source": {"hub": {name: value for name, value in hub.items() if name != "tokenSecretRef"}}}


def _without_token_of_model(block: Any) -> Any:
    """A drafter's block in JSON without the token Secret of its model."""
    return {**block, "model": _without_token(block["model"])} if isinstance(block, dict) and "model" in block else block


def _sources(variable: dict[str, Any]) -> set[str]:
    """Kinds of source in valueFrom, which is not validated yet."""
    source = variable.get("valueFrom")
    return {*source} if isinstance(source, dict) else set()


def _environment(spec: SpeculativeServiceSpec) -> list[dict[str, Any]]:
    """Variables that may affect step times, sorted by name. podTemplate's override the engine's, as in pods."""
    engine = {variable.name: variable.wire() for variable in spec.engine.env}
    variables = {**engine, **{variable.name: variable.wire() for variable in spec.pod_template.env}}
    kept = [variables[name] for name in sorted(variables) if not _NO_MATTER.search(name)]
    sources = [source.wire() for source in spec.pod_template.env_from]
    return [
        *({"value": "", **variable} for variable in kept if not _sources(variable) & _NO_MATTER_SOURCES),
        *(source for source in sources if "secretRef" not in source),
    ]


def _claims(template: PodTemplate) -> dict[str, Any]:
    """Resource claims (DRA) of the runtime container: a part of a device counts as another device."""
    used = template.resources.others.get("claims") if template.resources is not None else None
    return {"claims": [used, template.others.get("resourceClaims")]} if used else {}


def _limits(resources: Resources | None) -> dict[str, str]:
    limits = resources.limits if resources is not None else {}
    return {name: str(limits[name]) for name in ("cpu", "memory") if name in limits}
