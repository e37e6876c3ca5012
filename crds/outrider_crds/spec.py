"""`SpeculativeService.spec`, which users write.

Docstrings of fields become the descriptions that `kubectl explain` prints. Rules that span fields are in `rules`.
Parts with a subject of their own have modules of their own.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from outrider_crds.base import Duration, MapList, Model, Percent
from outrider_crds.draft_pool import MOST_DRAFT_TOKENS, DrafterSpec
from outrider_crds.existing_pods import WorkloadForm
from outrider_crds.model_sources import (
    MOST_ADAPTERS,
    AdapterSpec,
    CABundle,
    EmptyDirCache,
    Lora,
    ModelCache,
    ModelRef,
    SecretKeyRef,
)
from outrider_crds.names import LabelKey, Labels, Name, ObjectName, Product, ResourceName, ServedName
from outrider_crds.pod_template import EnvVar, PodTemplate, Toleration
from outrider_crds.rollout_settings import Rollout

API_GROUP = "outrider.dev"
API_VERSION = "v1alpha1"
KIND = "SpeculativeService"
PLURAL = "speculativeservices"

CPU_PRODUCT = "cpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"

MOST_DRAFTERS = 8
MOST_PRODUCTS = 8
MOST_SLO_CLASSES = 8


class Accelerator(Model):
    products: Annotated[list[Product], Field(min_length=1, max_length=MOST_PRODUCTS)]
    """GPU products as the node label names them (`NVIDIA-H200`), any of which may be used; or `cpu` alone."""
    count: Annotated[int, Field(ge=1, le=16)] | None = None
    """GPUs per pod; must equal engine.tensorParallelSize / engine.nodes (the default). Not allowed on cpu."""
    product_label: LabelKey = GPU_PRODUCT_LABEL
    """Node label that carries the product."""
    resource_name: ResourceName = GPU_RESOURCE
    """Extended resource that the device plugin offers."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Tolerations of serving and profiling pods."""
    node_selector: Labels = {}
    """Further node labels that pods require."""

    @property
    def on_cpu(self) -> bool:
        return self.products == [CPU_PRODUCT]


class SLOClassSpec(Model):
    name: Name
    """Name of the class; a request names it in the header X-SLO-Class or in vllm_xargs.slo_class."""
    tpot: Duration
    """Longest time per output token after the first, above 0, for example 50ms."""
    ttft: Duration | None = None
    """Longest time to the first token, above 0, for example 2s; no limit when absent."""
    objective_percent: Annotated[Percent, Field(ge=1)] = 95
    """Share of finished requests that should meet the class."""


class SpeculationMode(StrEnum):
    CLOSED_LOOP = "ClosedLoop"
    STATIC = "Static"
    OFF = "Off"


class DraftPrefillMode(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Speculation(Model):
    mode: SpeculationMode = SpeculationMode.CLOSED_LOOP
    """ClosedLoop tunes the draft length at every step; Static always proposes maxDraftTokens with the first
    drafter; Off never speculates (write "Off" in quotes: YAML reads a bare Off as false). Changing it restarts
    nothing."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 5
    """Most tokens a drafter may propose for a request in one step. Lowering it restarts nothing."""
    draft_prefill: DraftPrefillMode = DraftPrefillMode.AUTO
    """Feeding of prompts to neural drafters. Auto stops it while a drafter does not pay, as under load; Always keeps
    every drafter ready, which costs prefill time; Never runs no neural drafter. Changing it restarts nothing."""


class ProfilingMode(StrEnum):
    AUTO = "Auto"
    REQUIRED = "Required"
    SKIP = "Skip"


class Profiling(Model):
    mode: ProfilingMode = ProfilingMode.AUTO
    """Auto serves while the profile is measured; Required rolls out only once it is there; Skip measures none, and
    pods learn step times while they serve."""
    max_age: Duration | None = None
    """A profile older than this is measured again; the old one serves meanwhile. Never, when absent."""
    timeout: Duration = "30m"
    """A profiling Job that runs longer is stopped and counts as failed."""
    time_budget: Duration = "5m"
    """Time that the measurements themselves may take; a smaller budget measures fewer shapes."""


class Backend(StrEnum):
    VLLM = "vLLM"
    TORCH = "Torch"


class Dtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Engine(Model):
    backend: Backend = Backend.VLLM
    """The serving engine. Torch is a small one of Outrider's own, for Llama, SmolLM2, Qwen2 and Qwen3."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs that one copy of the target is split over, in all its pods together."""
    nodes: Annotated[int, Field(ge=1, le=16)] = 1
    """Pods that one copy of the target is split over. Pods that take all GPUs of a node are on different nodes. Above 1
    a replica is a group of a LeaderWorkerSet: its leader answers requests, and its workers compute their share."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """Longest request in tokens, prompt and answer together; the model's own limit when absent."""
    dtype: Dtype = Dtype.AUTO
    """Type of the weights and activations. auto is the model's own, and float32 on CPUs without bfloat16."""
    served_model_names: Annotated[list[ServedName], Field(max_length=16)] = []
    """Further names that requests may use for the model. Answers carry target.name."""
    lora: Lora | None = None
    """Room for LoRA adapters (engine.backend vLLM only). Without it spec.adapters must be empty."""
    extra_args: Annotated[list[Annotated[str, Field(max_length=2048)]], Field(max_length=32)] = []
    """Further arguments of the engine, as on its command line: `--max-num-seqs=32`, or `--max-num-seqs` and `32` as two
    entries."""
    env: Annotated[list[EnvVar], Field(max_length=32), MapList("name")] = []
    """Environment of the engine's process, in serving and profiling pods alike."""

    def argument(self, flag: str) -> str | None:
        """The value of `flag` in `extra_args`, of several the last, as the engine takes it; None without one."""
        words = [word for argument in self.extra_args for word in argument.split("=", 1)]
        values = [value for word, value in pairwise(words) if word.replace("_", "-") == flag]
        return values[-1] if values else None

    @property
    def max_num_seqs(self) -> int | None:
        """Most requests in a step, as `extra_args` say; None: the engine's default. The engine itself refuses a value
        that is not a number."""
        value = self.argument("--max-num-seqs") or ""
        return (int(value) or None) if value.isdecimal() else None


class Gateway(Model):
    inference_pool: bool = False
    """True makes an InferencePool (Gateway API Inference Extension, v1) with the service's name, so that a gateway
    routes requests to the pods by load and prefix. Changing it restarts nothing."""
    endpoint_picker: ObjectName | None = None
    """Kubernetes Service of the endpoint picker in the service's namespace, with gRPC on port 9002; NAME-epp when
    absent. Without an answer of the picker the gateway chooses a pod by itself."""


class MetricsSource(StrEnum):
    PODS = "Pods"
    PROMETHEUS = "Prometheus"


class Metrics(Model):
    source: MetricsSource = MetricsSource.PODS
    """Source of the status figures: the pods' state endpoints, or the Prometheus that the chart names."""


class SpeculativeServiceSpec(Model):
    """What to serve, on what, and how fast."""

    target: ModelRef
    """The model that is served."""
    draft_pool: Annotated[list[DrafterSpec], Field(max_length=MOST_DRAFTERS), MapList("name")] = []
    """Drafters that may propose tokens. "No speculation" is always a candidate. Mode Static uses the first;
    changing the order restarts nothing."""
    adapters: Annotated[list[AdapterSpec], Field(max_length=MOST_ADAPTERS), MapList("name")] = []
    """LoRA adapters of the target. Pods load and unload them without a restart; needs engine.lora."""
    accelerator: Accelerator
    """The hardware that pods run on."""
    slo_classes: Annotated[list[SLOClassSpec], Field(max_length=MOST_SLO_CLASSES), MapList("name")] = []
    """Latency classes that requests may name."""
    default_slo_class: Annotated[Name | None, Field(alias="defaultSLOClass")] = None
    """SLO class of requests that name none. Absent: the first of sloClasses."""
    speculation: Speculation = Speculation()
    """How the draft length is chosen."""
    profiling: Profiling = Profiling()
    """How step times are measured."""
    rollout: Rollout = Rollout()
    """How changes reach the pods."""
    engine: Engine = Engine()
    """The serving engine and its arguments."""
    workload: WorkloadForm | None = None
    """Pods that Outrider does not make. Absent: it makes the pods."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Serving pods; an autoscaler sets it through the scale subresource."""
    paused: bool = False
    """True stops rollouts and profiling; the pods serve on."""
    model_cache: ModelCache = ModelCache(empty_dir=EmptyDirCache())
    """Place of downloaded models: exactly one of pvc, emptyDir."""
    ca_bundle: CABundle | None = None
    """Certificates of the authorities that pods trust when they download models from a hub or a bucket, exactly one of
    configMap, secret. They take the place of the image's own, so a bundle for public hosts holds those too."""
    gateway: Gateway = Gateway()
    """How gateways reach the pods."""
    metrics: Metrics = Metrics()
    """Source of the status figures."""
    pod_template: PodTemplate = PodTemplate()
    """Any field of a pod's spec, merged into what Outrider writes: maps by key, lists by name, null removes. Kubernetes
    validates it; docs/how-to/shape-pods.md names the few that are Outrider's."""

    @property
    def gpus_per_pod(self) -> int:
        """GPUs of one pod; 0 on cpu."""
        if self.accelerator.on_cpu:
            return 0
        return self.accelerator.count or self.engine.tensor_parallel_size // self.engine.nodes

    @property
    def is_measurable(self) -> bool:
        """True if a profiling Job may measure the target: its one pod holds no more than a node does."""
        return self.profiling.mode is not ProfilingMode.SKIP and self.engine.nodes == 1

    @property
    def class_of_unmarked_requests(self) -> str | None:
        """The SLO class of requests that name none; None when there are no classes."""
        return self.default_slo_class or next((slo_class.name for slo_class in self.slo_classes), None)

    @property
    def models(self) -> dict[str, ModelRef]:
        """Field of each model below `spec`, and the model."""
        drafts = {
            f"draftPool[{drafter.name}]": drafter.neural.model
            for drafter in self.draft_pool
            if drafter.neural is not None
        }
        return {"target": self.target, **drafts}

    @property
    def token_refs(self) -> list[SecretKeyRef]:
        """Secrets with hub tokens that target and drafts name."""
        hubs = [model.source.hub for model in self.models.values() if model.source.hub is not None]
        return [hub.token_secret_ref for hub in hubs if hub.token_secret_ref is not None]
