"""Rules for where models and adapters come from."""

from __future__ import annotations

from outrider_crds import model_sources
from outrider_crds.model_sources import AdapterFolder, AdapterSource, AdapterVolume
from outrider_crds.pod_template import HostPathVolume
from outrider_crds.rule import Rule, exactly_one, inside, rules_on
from outrider_crds.spec import SpeculativeServiceSpec

MODEL_RULES: tuple[Rule, ...] = (
    exactly_one(model_sources.ModelSource, "source", "keep the one that the weights come from"),
    exactly_one(model_sources.CABundle, "caBundle", "keep the one with the certificates"),
    exactly_one(model_sources.ModelCache, "modelCache", "keep one"),
    exactly_one(AdapterVolume, "volume", "keep the one with the adapters"),
    exactly_one(AdapterSource, "source of an adapter", "keep the one that it comes from"),
    inside(model_sources.PvcSource, "inside the volume"),
    inside(model_sources.OciSource, "inside the image"),
    inside(model_sources.HostPathSource, "on the node"),
    inside(HostPathVolume, "on the node"),
    inside(AdapterFolder, "inside engine.lora.volume"),
    Rule(
        model_sources.ModelRef,
        ".revision",
        "!has(self.revision) || has(self.source.hub)",
        "revision is read from the hub only: remove it, or use source.hub",
    ),
    *rules_on(
        SpeculativeServiceSpec,
        (
            ".target.source.s3",
            "self.engine.backend == 'vLLM' || !has(self.target.source.s3)",
            "source.s3 needs engine.backend vLLM, whose streamer reads buckets: use another source, or set it",
        ),
        (
            ".adapters",
            "!has(self.adapters) || self.adapters.size() == 0 || has(self.engine.lora)",
            "adapters need engine.lora, which reserves memory for them: add it (it may be empty), or remove them",
        ),
        (
            ".adapters",
            "!has(self.adapters) || !has(self.engine.lora) || has(self.engine.lora.volume) "
            "|| !self.adapters.exists(a, has(a.source.folder))",
            "an adapter with source.folder needs engine.lora.volume, the volume with the folder: add it",
        ),
        (
            ".adapters",
            "!has(self.adapters) || self.adapters.all(a, a.name != self.target.name "
            "&& (!has(self.engine.servedModelNames) || !(a.name in self.engine.servedModelNames)))",
            "an adapter must not have a name of the target (target.name, engine.servedModelNames): choose another",
        ),
    ),
)
