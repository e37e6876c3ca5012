"""`SpeculativeService.spec`, which users write.

Docstrings of fields become the descriptions that `kubectl explain` prints. Rules that span fields are in `rules`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from outrider_crds.base import Duration, MapList, Model, Path, Percent, ShortText
from outrider_crds.names import (
    BucketUri,
    DataKey,
    HostFolder,
    Image,
    LabelKey,
    Labels,
    Name,
    ObjectName,
    Product,
    ResourceName,
    ServedName,
)
from outrider_crds.pod_template import EnvVar, PodTemplate
from outrider_crds.quantity import Size
from outrider_crds.scheduling import Toleration

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
MOST_DRAFT_TOKENS = 16
MOST_ADAPTERS = 32
SINK_TOKENS = 16
"""Tokens at the beginning of a request that a drafter with a window reads by default."""
MOST_WINDOW_TOKENS = 1_000_000


class SecretKeyRef(Model):
    name: ObjectName
    """Name of the Secret in the service's namespace."""
    key: DataKey = "token"
    """Key in the Secret that holds the token."""


class HubSource(Model):
    token_secret_ref: SecretKeyRef | None = None
    """Secret with the access token for a gated model. The pod reads it; the operator never does."""


class PvcSource(Model):
    claim_name: ObjectName
    """PersistentVolumeClaim in the service's namespace that holds the model."""
    path: Path
    """Folder of the model inside the volume."""


class HostPathSource(Model):
    path: HostFolder
    """Absolute folder on the node, inside one that the installation allows."""


class OciSource(Model):
    reference: Image
    """Image or artifact that holds the model, for example registry.example.com/models/llama:1, or with a digest. The
    node pulls it, with podTemplate.imagePullSecrets."""
    path: Path | None = None
    """Folder of the model inside the image; the image's root when absent."""


class S3Source(Model):
    uri: BucketUri
    """Folder of the model in an S3 bucket, for example s3://models/llama-8b. Weights are streamed to the device and are
    never on a disk. Credentials and endpoint are those of the pod: its service account, or AWS_* variables."""


class ModelSource(Model):
    hub: HubSource | None = None
    """Download from the model hub by name and revision."""
    pvc: PvcSource | None = None
    """Read from a PersistentVolumeClaim."""
    host_path: HostPathSource | None = None
    """Read from a folder on the node."""
    oci: OciSource | None = None
    """Read from an image that the node pulls (Kubernetes' image volumes)."""
    s3: S3Source | None = None
    """Stream from an S3 bucket (engine.backend vLLM only)."""


class ModelRef(Model):
    name: ShortText
    """The model's name; on the hub, `organisation/model`. Clients of the OpenAI endpoint send this name."""
    revision: ShortText | None = None
    """Commit, tag or branch on the hub. Pin a commit in production."""
    source: ModelSource = ModelSource(hub=HubSource())
    """Source of the weights: exactly one of hub, pvc, hostPath, oci, s3."""


class DraftMethod(StrEnum):
    PROMPT_LOOKUP = "PromptLookup"
    DRAFT_MODEL = "DraftModel"
    EAGLE = "Eagle"
    SPARSE_SELF = "SparseSelf"
    MEDUSA = "Medusa"
    BLOCK = "Block"
    MTP = "MTP"


class PromptLookup(Model):
    min_tokens: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest n-gram that may match, in tokens."""
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest n-gram that is tried, in tokens."""


class NeuralDraft(Model):
    model: ModelRef
    """The draft's weights. They must share the target's vocabulary."""


class DraftModel(NeuralDraft):
    window_tokens: Annotated[int, Field(ge=1, le=MOST_WINDOW_TOKENS)] | None = None
    """Tokens at the end of the request that every draft pass reads, together with the first 16, both rounded up to
    whole pages of the KV cache. Absent: the whole request. For long contexts (engine.backend vLLM only)."""


class BlockDraft(NeuralDraft):
    max_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] | None = None
    """Most tokens that it proposes for a request in a step, at most what the checkpoint's block holds. When absent:
    that, or speculation.maxDraftTokens where it is less."""


class MTP(Model):
    """Multi-token prediction has no settings: its layers are in the target's own checkpoint."""


class SparseSelf(Model):
    sink_tokens: Annotated[int, Field(ge=0, le=1024)] = SINK_TOKENS
    """Tokens at the beginning of the request that every draft pass reads, rounded up to whole pages of the KV cache."""
    window_tokens: Annotated[int, Field(ge=1, le=MOST_WINDOW_TOKENS)] = 512
    """Tokens at the end of the request that every draft pass reads, rounded up to whole pages of the KV cache. A larger
    window has a higher acceptance rate, and costs more to read."""

    @property
    def tokens(self) -> int:
        """Most tokens of a request that a draft pass reads, before they are rounded up."""
        return self.sink_tokens + self.window_tokens


class DrafterSpec(Model):
    name: Name
    """Name of this drafter, unique in the pool; status and metrics use it."""
    method: DraftMethod
    """PromptLookup, DraftModel, Eagle, SparseSelf, Medusa, Block or MTP; the block of the same name holds its
    settings."""
    prompt_lookup: PromptLookup | None = None
    """Proposes the tokens that followed the same n-gram earlier in the request (no model)."""
    draft_model: DraftModel | None = None
    """Proposes tokens one by one with a small model of the same vocabulary."""
    eagle: NeuralDraft | None = None
    """Proposes tokens with an EAGLE-3 head on the target's hidden states."""
    sparse_self: SparseSelf | None = None
    """Proposes tokens with the target itself, which reads only the beginning and the end of the request (no model; for
    long contexts)."""
    medusa: NeuralDraft | None = None
    """Proposes one token per Medusa head on the target's last hidden state, all at once (engine.backend Torch only)."""
    block: BlockDraft | None = None
    """Proposes all tokens in one pass over the target's hidden states, with a block drafter: DFlash, DFlash2 or DSpark,
    as its checkpoint says (engine.backend vLLM only)."""
    mtp: MTP | None = None
    """The multi-token prediction layer of the target's own checkpoint proposes tokens one by one (engine.backend vLLM
    only)."""
    paused: bool = False
    """True: the drafter stays loaded but proposes nothing. Changing it restarts nothing."""

    @property
    def neural(self) -> NeuralDraft | None:
        """The draft's weights, or None for a drafter that has none."""
        return self.draft_model or self.eagle or self.medusa or self.block

    @property
    def window(self) -> int | None:
        """Tokens of a request that the manifest lets a draft pass read; None: all of them."""
        if self.sparse_self is not None:
            return self.sparse_self.tokens
        return self.draft_model.window_tokens if self.draft_model is not None else None


class Accelerator(Model):
    products: Annotated[list[Product], Field(min_length=1, max_length=MOST_PRODUCTS)]
    """GPU products as the node label names them (`NVIDIA-H200`), any of which may be used; or `cpu` alone."""
    count: Annotated[int, Field(ge=1, le=16)] | None = None
    """GPUs per pod; must equal engine.tensorParallelSize (the default). Not allowed on cpu."""
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
    """Longest time per output token after the first, for example 50ms."""
    ttft: Duration | None = None
    """Longest time to the first token, for example 2s."""
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
    """Auto skips the draft's forward passes under load; Always runs them; Never runs no neural draft."""


class ProfilingMode(StrEnum):
    AUTO = "Auto"
    REQUIRED = "Required"
    SKIP = "Skip"


class Profiling(Model):
    mode: ProfilingMode = ProfilingMode.AUTO
    """Auto serves while the profile is measured; Required rolls out only once it is there; Skip learns online."""
    max_age: Duration | None = None
    """A profile older than this is measured again; the old one serves meanwhile."""
    timeout: Duration = "30m"
    """A profiling Job that runs longer is stopped and counts as failed."""
    time_budget: Duration = "5m"
    """Time that the measurements themselves may take; a smaller budget measures fewer shapes."""


class RolloutStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    DRAFT_CANARY = "DraftCanary"


class OnMissingDrafter(StrEnum):
    HOLD = "Hold"
    CONTINUE = "Continue"


class OnInconclusive(StrEnum):
    HOLD = "Hold"
    PROMOTE = "Promote"
    ROLLBACK = "Rollback"


class RolloutCanary(Model):
    pods: Annotated[int, Field(ge=1, le=8)] = 1
    """Canary pods of each product in use. Each hosts both pools."""
    candidate_percent: Annotated[int, Field(ge=1, le=99)] = 50
    """Share of a canary pod's requests that the candidate's drafters propose for."""
    least_gain_percent: Annotated[int, Field(ge=-50, le=100)] = -3
    """Gain in percent that the candidate needs; negative: it may be so much worse. It is rolled out once the whole
    range of its gain is above this, and fails once all of it is below."""
    min_requests: Annotated[int, Field(ge=10, le=1_000_000)] = 100
    """Finished requests of each arm before the first judgement."""
    timeout: Duration = "6h"
    """Longest measurement; without a verdict by then, onInconclusive says what happens."""
    on_inconclusive: OnInconclusive = OnInconclusive.HOLD
    """Hold leaves the canary pod for a human to decide, Promote rolls the candidate out, Rollback takes the pod
    away."""


class Rollout(Model):
    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """RollingUpdate replaces pods within maxSurge and maxUnavailable. DraftCanary first measures a changed draftPool
    against the running one in a canary pod, each on a random share of its requests, and rolls it out once its gain is
    above leastGainPercent."""
    canary: RolloutCanary = RolloutCanary()
    """The measurement of strategy DraftCanary."""
    max_surge: Annotated[int, Field(ge=0, le=100)] = 1
    """Pods above `replicas` that a rollout may start."""
    max_unavailable: Annotated[int, Field(ge=0, le=100)] = 0
    """Pods below `replicas` that a rollout may leave. Set 1 where no GPU is free for a surge pod."""
    on_missing_drafter: OnMissingDrafter = OnMissingDrafter.HOLD
    """Hold keeps the old pods until the first new pod reports every drafter of draftPool loaded. Continue replaces them
    all the same."""
    progress_deadline: Duration = "20m"
    """A pod that is not ready after this time makes the rollout Stalled."""
    drain_timeout: Duration = "2m"
    """Running requests of a pod that is being replaced may take this long to finish."""


class Backend(StrEnum):
    VLLM = "vLLM"
    TORCH = "Torch"


class Dtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class AdapterVolume(Model):
    pvc: PvcSource | None = None
    """Folder of a PersistentVolumeClaim."""
    host_path: HostPathSource | None = None
    """Folder on the node."""


class Lora(Model):
    max_adapters: Annotated[int, Field(ge=1, le=MOST_ADAPTERS)] = 4
    """Adapters that the requests of one engine step may use; requests with another one wait. Each takes memory of the
    device."""
    max_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Highest rank of an adapter. Memory and step times grow with it, whatever the ranks in use."""
    volume: AdapterVolume | None = None
    """Folder that adapters with source.folder are read from, exactly one of pvc, hostPath. Pods mount it read-only, and
    an adapter that is put there later needs no restart."""


class AdapterFolder(Model):
    path: Path
    """Folder of the adapter inside engine.lora.volume."""


class AdapterRepository(Model):
    repository: ShortText
    """Repository of the adapter on the hub, `organisation/adapter`."""
    revision: ShortText | None = None
    """Commit, tag or branch. Pin a commit in production."""


class AdapterSource(Model):
    folder: AdapterFolder | None = None
    """Read from a folder of engine.lora.volume."""
    hub: AdapterRepository | None = None
    """Download from the model hub, with the token of the target."""


class AdapterSpec(Model):
    name: ServedName
    """Name by which requests ask for the adapter, in the field `model`."""
    source: AdapterSource
    """Source of the adapter: exactly one of folder, hub. To replace weights, change the source or the name: a folder's
    contents are read once."""


class Engine(Model):
    backend: Backend = Backend.VLLM
    """The serving engine. Torch is a small one of Outrider's own, for Llama, SmolLM2, Qwen2 and Qwen3."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs that one copy of the target is split over."""
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


class PvcCache(Model):
    claim_name: ObjectName
    """PersistentVolumeClaim that keeps downloaded models."""


class EmptyDirCache(Model):
    size_limit: Size | None = None
    """Largest size of the cache, for example 200Gi."""


class ModelCache(Model):
    pvc: PvcCache | None = None
    """Keep downloaded models on a claim that pods share."""
    empty_dir: EmptyDirCache | None = None
    """Keep downloaded models as long as the pod lives."""


class BundleRef(Model):
    name: ObjectName
    """Name of the object in the service's namespace."""
    key: DataKey = "ca.crt"
    """Key in it that holds the certificates, in PEM."""


class CABundle(Model):
    config_map: BundleRef | None = None
    """ConfigMap with the certificates."""
    secret: BundleRef | None = None
    """Secret with the certificates. The pod reads it; the operator never does."""


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
    """Drafters that may propose tokens. "No speculation" is always a candidate. Mode Static asks the first;
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
