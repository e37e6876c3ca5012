"""The configuration that the operator mounts into a serving pod, and its paths.

`BootConfig` is fixed for the life of a pod: an immutable ConfigMap per revision. `HotConfig` may change while the pod
runs: one mutable ConfigMap, whose digest the pod reports in its state. `serve -f MANIFEST` builds both itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from outrider_crds.base import MapList, Model, Percent, digest
from outrider_crds.contract import Contract
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.model_sources import AdapterSpec, AdapterVolume, ModelRef, ModelSource
from outrider_crds.profile_keys import ProfileKeys, profile_keys
from outrider_crds.spec import (
    MOST_PRODUCTS,
    Accelerator,
    DraftPrefillMode,
    Engine,
    SLOClassSpec,
    SpeculationMode,
    SpeculativeServiceSpec,
)

CONFIG_SCHEMA = 1
BOOT_FILE = "/etc/outrider/boot/config.json"
HOT_FILE = "/etc/outrider/hot/config.json"
CONFIG_KEY = "config.json"  # the data key in both ConfigMaps
PROFILES_DIR = "/etc/outrider/profiles"  # <PROFILES_DIR>/<product>/{target.json,<drafter key>.json}
PODINFO_DIR = "/etc/outrider/podinfo"  # downward API: the file `annotations`, as the kubelet writes it
PRODUCT_ANNOTATION = "outrider.dev/product"
MODEL_CACHE_DIR = "/var/cache/outrider"  # HF_HOME; the modelCache volume
MODEL_VOLUMES_DIR = "/var/lib/outrider/models"  # mounted sources: <dir>/target, <dir>/draft-<drafter name>
CA_FILE = "/etc/outrider/ca/ca.crt"  # spec.caBundle
TARGET_MOUNT = "target"
ADAPTERS_MOUNT = "adapters"  # engine.lora.volume, in the same folder
SERVING_PORT = 8000  # the OpenAI-compatible API, behind the Service
ADMIN_PORT = 9000  # state, metrics and probes; not behind the Service
STATE_PATH = "/outrider/state"
WHY_PATH = "/outrider/why"  # the last decisions, for people
METRICS_PATH = "/metrics"
LIVE_PATH = "/livez"
READY_PATH = "/readyz"
SLO_CLASS_HEADER = "X-SLO-Class"
SLO_LIMIT_HEADERS = {"x-llm-d-slo-tpot-ms": "slo_tpot_ms", "x-llm-d-slo-ttft-ms": "slo_ttft_ms"}
"""Headers of llm-d's gateway with a request's own SLO -> key in SamplingParams.extra_args."""


class BootConfig(Contract):
    schema_version: int = CONFIG_SCHEMA
    service: str
    namespace: str
    revision: str
    """Name of the revision, as in the pod's label; "local" without Kubernetes."""
    target: ModelRef
    draft_pool: list[DrafterSpec] = []
    accelerator: Accelerator
    engine: Engine
    max_draft_tokens: int
    """Most draft tokens that the engine is built for. The hot value may be lower, but not higher."""
    profile_keys: Annotated[list[ProfileKeys], Field(max_length=MOST_PRODUCTS), MapList("product")] = []
    """One entry per product."""


class CanaryConfig(Model):
    """Two draft pools in one pod. Each request is assigned to one pool at random, and only its drafters propose."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the attempt. The sums in the state start from 0 when it changes."""
    stable: list[str]
    """Names of the running revision's drafters in the boot config. A changed drafter is NAME-was."""
    candidate: list[str]
    """Names of the spec's drafters in the boot config. A drafter may be in both arms."""
    candidate_percent: Percent
    """Share of the requests of each SLO class that the candidate gets."""

    @field_validator("stable", "candidate")
    @classmethod
    def _no_drafter_twice(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise PydanticCustomError("duplicate", "Duplicate value: an arm names a drafter twice")
        return names


class HotConfig(Contract):
    schema_version: int = CONFIG_SCHEMA
    mode: SpeculationMode
    draft_prefill: DraftPrefillMode
    max_draft_tokens: int
    slo_classes: list[SLOClassSpec] = []
    default_slo_class: str | None = Field(default=None, alias="defaultSLOClass")
    paused_drafters: list[str] | None = None
    """Drafters that must not propose; None: every drafter may propose."""
    drafter_order: list[str] | None = None
    """Names of the pool's drafters in order. Mode Static uses the first. None: the order at boot."""
    adapters: list[AdapterSpec] | None = None
    """LoRA adapters to load; None: none."""
    canary: CanaryConfig | None = None
    """Arms of a draft canary, which include every drafter of the boot config. None: all drafters serve all requests."""


def boot_config(
    spec: SpeculativeServiceSpec, *, service: str, namespace: str, revision: str, image: str, max_draft_tokens: int
) -> BootConfig:
    """The part of `spec` that only a restart can change."""
    return BootConfig(
        service=service,
        namespace=namespace,
        revision=revision,
        target=spec.target,
        draft_pool=[drafter.model_copy(update={"paused": False}) for drafter in spec.draft_pool],
        accelerator=spec.accelerator,
        engine=spec.engine,
        max_draft_tokens=max_draft_tokens,
        profile_keys=[profile_keys(spec, product, image) for product in spec.accelerator.products],
    )


def hot_config(spec: SpeculativeServiceSpec, boot_pools: Iterable[Sequence[DrafterSpec]] = ()) -> HotConfig:
    """The part of `spec` that takes effect without a restart. boot_pools: draft pools of the pods that read it."""
    order = [drafter.name for drafter in spec.draft_pool]
    is_news = any(is_reordered(order, [drafter.name for drafter in pool]) for pool in boot_pools)
    return HotConfig(
        mode=spec.speculation.mode,
        draft_prefill=spec.speculation.draft_prefill,
        max_draft_tokens=spec.speculation.max_draft_tokens,
        slo_classes=spec.slo_classes,
        default_slo_class=spec.class_of_unmarked_requests,
        paused_drafters=[drafter.name for drafter in spec.draft_pool if drafter.paused] or None,
        drafter_order=order if is_news else None,
        adapters=spec.adapters or None,
    )


def is_reordered(order: list[str], at_boot: list[str]) -> bool:
    """Do the drafters in both lists have a different order? A drafter that is added or removed needs new pods."""
    return [name for name in order if name in at_boot] != [name for name in at_boot if name in order]


def config_hash(config: HotConfig) -> str:
    """Digest of the config. A pod reports it in its state once the config is in force."""
    return digest(config.wire())


def read_hot_config(text: bytes) -> tuple[HotConfig, str]:
    """The config in `text`, and the digest of `text`.

    The digest is that of the document, including fields that this release does not know. Otherwise an operator of
    another release would wait for it for ever. Raises pydantic's ValidationError.
    """
    return HotConfig.read(text), digest(json.loads(text))


def draft_mount(drafter: str) -> str:
    """Folder of a drafter's model under MODEL_VOLUMES_DIR. It never equals the target's."""
    return f"draft-{drafter}"


def adapters_folder(volume: AdapterVolume, *, mounted: bool = True) -> str:
    """Folder that `AdapterFolder.path` is relative to. mounted: in a pod, where a hostPath is mounted itself."""
    if volume.host_path is not None:
        return f"{MODEL_VOLUMES_DIR}/{ADAPTERS_MOUNT}" if mounted else volume.host_path.path
    claim_or_image = volume.pvc or volume.oci
    path = claim_or_image.path or "" if claim_or_image is not None else ""
    return f"{MODEL_VOLUMES_DIR}/{ADAPTERS_MOUNT}/{path.strip('/')}".rstrip("/")


def model_location(model: ModelRef, mount: str) -> str:
    """Model argument of the engine: a folder under MODEL_VOLUMES_DIR/<mount>, the bucket's URI, or the name on the hub.

    A hostPath source is mounted at MODEL_VOLUMES_DIR/<mount> itself. A pvc or oci source is a subfolder of the claim or
    image there.
    """
    source: ModelSource = model.source
    if source.s3 is not None:
        return source.s3.uri
    if source.host_path is not None:
        return f"{MODEL_VOLUMES_DIR}/{mount}"
    volume = source.pvc or source.oci
    if volume is not None:
        return f"{MODEL_VOLUMES_DIR}/{mount}/{(volume.path or '').strip('/')}".rstrip("/")
    return model.name
