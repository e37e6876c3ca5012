"""Which drafters of the pool one engine can host, found before it starts (a drafter never keeps a pod down).

vLLM hosts one neural drafter; beside it the worker hosts one drafter of each method that needs no model. What cannot be
hosted is named with its reason in the pod's state, and the pod serves without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider_crds.base import Model
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, draft_mount, model_location
from outrider_crds.spec import Drafter, DraftMethod, ModelRef

from outrider_runtime.vllm_plugin import suffix

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
_NEURAL = "neural"


class ModelPlaces(Model):
    """Where models lie: in a pod under the mounts that the operator made, on a laptop where the manifest says."""

    mounted: bool = True

    def location(self, model: ModelRef, mount: str) -> str:
        """A folder, or the name on the hub."""
        host_path = model.source.host_path
        return host_path.path if host_path is not None and not self.mounted else model_location(model, mount)


class Pool(Model):
    model_free: tuple[Drafter, ...] = ()
    """At most one of a method."""
    neural: Drafter | None = None
    dropped: dict[str, str] = {}
    """Drafter name -> the sentence that says why it is not hosted."""

    @property
    def hosted(self) -> tuple[Drafter, ...]:
        return self.model_free if self.neural is None else (*self.model_free, self.neural)

    def without_neural(self, reason: str) -> Pool:
        if self.neural is None:
            return self
        return Pool(model_free=self.model_free, dropped={**self.dropped, self.neural.name: reason})


def choose_pool(boot: BootConfig, places: ModelPlaces) -> Pool:
    """The first drafter of each method without a model, and the first neural one that can load, in the pool's order."""
    hosted: dict[str, Drafter] = {}  # "neural", or the method of a drafter without a model
    dropped: dict[str, str] = {}
    for drafter in boot.draft_pool:
        kind = _NEURAL if drafter.neural is not None else drafter.method.value
        reason = _obstacle(boot, drafter, places)
        if kind in hosted:
            reason = f"this release hosts one {kind} drafter at a time and uses {hosted[kind].name!r}"
            reason += " (docs/two-neural-drafters.md says why)" if kind == _NEURAL else ""
        if reason:
            dropped[drafter.name] = reason
        else:
            hosted[kind] = drafter
    neural = hosted.pop(_NEURAL, None)
    return Pool(model_free=tuple(hosted.values()), neural=neural, dropped=dropped)


def _obstacle(boot: BootConfig, drafter: Drafter, places: ModelPlaces) -> str:
    """Why `drafter` cannot propose for the target, in a sentence; empty when nothing is known against it."""
    if drafter.neural is None:
        return suffix.library_obstacle() if drafter.method is DraftMethod.SUFFIX else ""
    draft = drafter.neural.model
    try:
        draft_config = read_config(draft, places.location(draft, draft_mount(drafter.name)))
        target_config = read_config(boot.target, places.location(boot.target, TARGET_MOUNT))
    except (OSError, ValueError) as error:
        return str(error)
    return (
        _wrong_architecture(drafter, draft_config)
        or _wrong_vocabulary_size(draft_config, target_config)
        or _wrong_tokens(places.location(draft, draft_mount(drafter.name)), places.location(boot.target, TARGET_MOUNT))
        or _wrong_width(drafter, draft_config, target_config)
    )


def read_config(model: ModelRef, location: str) -> dict[str, Any]:
    """The model's config.json, from its folder or from the hub. Raises OSError or ValueError with a sentence."""
    path = _file(location, model.revision, CONFIG_FILE)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_FILE} of model {model.name!r} ({location}) cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG_FILE} of model {model.name!r} ({location}) is not a JSON object")
    return config


def _file(location: str, revision: str | None, name: str) -> Path:
    if location.startswith("/") or Path(location).is_dir():
        path = Path(location, name)
        if not path.is_file():
            raise FileNotFoundError(f"model folder {location} has no {name}; check the path in the manifest")
        return path
    from huggingface_hub import hf_hub_download  # part of the engine's own installation

    try:
        return Path(hf_hub_download(location, name, revision=revision))
    except Exception as error:  # the hub's errors share no base class; any of them means "not there"
        raise OSError(f"model {location!r} cannot be had from the hub: {error}") from error


def _wrong_architecture(drafter: Drafter, config: dict[str, Any]) -> str:
    names = ", ".join(config.get("architectures") or []) or "no architecture"
    is_eagle = "eagle" in names.lower()
    if drafter.method is DraftMethod.EAGLE and not is_eagle:
        return f"the model is not an EAGLE-3 head (its config names {names}); use method DraftModel for it"
    if drafter.method is DraftMethod.DRAFT_MODEL and is_eagle:
        return f"the model is an EAGLE head ({names}), not a draft model; use method Eagle for it"
    return ""


def _wrong_vocabulary_size(draft: dict[str, Any], target: dict[str, Any]) -> str:
    sizes = draft.get("vocab_size"), target.get("vocab_size")
    if None in sizes or sizes[0] == sizes[1]:
        return ""
    return f"vocabulary mismatch: the draft has {sizes[0]} tokens and the target {sizes[1]}"


def _wrong_tokens(draft_location: str, target_location: str) -> str:
    draft, target = _tokens(draft_location), _tokens(target_location)
    if draft is None or target is None or draft == target:
        return ""
    return "vocabulary mismatch: draft and target have as many tokens, but not the same ones"


def _tokens(location: str) -> dict[str, int] | None:
    """Token text -> id of a model in a local folder; None where it has no tokenizer of its own (EAGLE heads)."""
    try:
        vocabulary = json.loads(Path(location, TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None


def _wrong_width(drafter: Drafter, draft: dict[str, Any], target: dict[str, Any]) -> str:
    """EAGLE-3 heads read the target's hidden states; a head of another width was trained for another model."""
    wanted = draft.get("target_hidden_size") or draft.get("hidden_size")
    has = target.get("hidden_size")
    if drafter.method is not DraftMethod.EAGLE or wanted is None or has is None or wanted == has:
        return ""
    return f"the EAGLE-3 head reads hidden states of width {wanted}, the target's are {has} wide"
