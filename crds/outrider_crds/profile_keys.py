"""Keys of a latency profile: equal settings have equal keys, in every service and release."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from outrider_crds.base import Model, digest
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.model_sources import Lora
from outrider_crds.names import Product
from outrider_crds.pod_template import PodTemplate, Resources
from outrider_crds.profile import PROFILE_SCHEMA
from outrider_crds.spec import GPU_RESOURCE, MOST_DRAFTERS, Backend, SpeculativeServiceSpec

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
