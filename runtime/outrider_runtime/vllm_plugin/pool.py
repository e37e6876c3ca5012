"""Which drafters of the pool one engine can host, found before it starts (a drafter never keeps a pod down).

What cannot be hosted is named with its reason in the pod's state, and the pod serves without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider_crds.base import Model
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, draft_mount, model_location
from outrider_crds.spec import Drafter, DraftMethod, ModelRef

from outrider_runtime.drafters import METHODS

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class ModelPlaces(Model):
    """Where models lie: in a pod under the mounts that the operator made, on a laptop where the manifest says."""

    mounted: bool = True

    def location(self, model: ModelRef, mount: str) -> str:
        """A folder, or the name on the hub."""
        host_path = model.source.host_path
        return host_path.path if host_path is not None and not self.mounted else model_location(model, mount)


class Pool(Model):
    hosted: tuple[Drafter, ...] = ()
    """In the pool's order. A drafter's place here is its number in what scheduler and worker tell each other."""
    dropped: dict[str, str] = {}
    """Drafter name -> the sentence that says why it is not hosted."""

    @property
    def neural(self) -> tuple[Drafter, ...]:
        return tuple(drafter for drafter in self.hosted if drafter.neural is not None)

    @property
    def primary(self) -> Drafter | None:
        """The one that vLLM's own config names: an EAGLE head if there is one, for whom the target hands out hidden
        states; else a draft model, for which vLLM keeps room in the KV cache; else a lookup."""
        heads = [drafter for drafter in self.neural if drafter.method is DraftMethod.EAGLE]
        return next(iter((*heads, *self.neural, *self.hosted)), None)

    def without(self, name: str, reason: str) -> Pool:
        left = tuple(drafter for drafter in self.hosted if drafter.name != name)
        return Pool(hosted=left, dropped={**self.dropped, name: reason})


def choose_pool(boot: BootConfig, places: ModelPlaces) -> Pool:
    """Whatever can load, in the pool's order."""
    pool = Pool()
    for drafter in boot.draft_pool:
        reason = _obstacle(boot, drafter, places)
        if reason:
            pool = pool.without(drafter.name, reason)
        else:
            pool = Pool(hosted=(*pool.hosted, drafter), dropped=pool.dropped)
    return pool


def _obstacle(boot: BootConfig, drafter: Drafter, places: ModelPlaces) -> str:
    """Why `drafter` cannot propose for the target, in a sentence; empty when nothing is known against it."""
    unsupported = METHODS[drafter.method].unsupported
    if unsupported or drafter.neural is None:
        return unsupported
    draft = drafter.neural.model
    try:
        draft_config = _of_the_layers(read_config(draft, places.location(draft, draft_mount(drafter.name))))
        target_config = read_config(boot.target, places.location(boot.target, TARGET_MOUNT))
    except (OSError, ValueError) as error:
        return str(error)
    return (
        _wrong_architecture(drafter, draft_config)
        or _wrong_vocabulary_size(draft_config, target_config)
        or _wrong_tokens(places.location(draft, draft_mount(drafter.name)), places.location(boot.target, TARGET_MOUNT))
        or _wrong_draft_vocabulary(drafter, draft_config, target_config)
        or _wrong_width(drafter, draft_config, target_config)
        or _wrong_layers(drafter, draft_config, target_config)
        or _too_few_positions(drafter, draft_config, boot.engine.max_model_len or _positions(target_config))
    )


def _of_the_layers(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what the speculators format keeps one level deeper: sizes and vocabulary."""
    return {**(config.get("transformer_layer_config") or {}), **config}


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
    if drafter.method is DraftMethod.EAGLE and not _is_head(config):
        return (
            f"the model is not an EAGLE-3 head: its config names {names} and has no draft_vocab_size; "
            "use method DraftModel for it"
        )
    if drafter.method is DraftMethod.DRAFT_MODEL and _is_head(config):
        return f"the model is an EAGLE head ({names}), not a draft model; use method Eagle for it"
    return ""


def _is_head(config: dict[str, Any]) -> bool:
    """Publishers name a head Eagle3 or like any model of its family; a draft_vocab_size is what only heads have."""
    names = " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type") or "")])
    return "eagle" in names.lower() or config.get("draft_vocab_size") is not None


def _positions(config: dict[str, Any]) -> int | None:
    positions = config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _too_few_positions(drafter: Drafter, draft: dict[str, Any], longest: int | None) -> str:
    """The engine feeds a draft model as far as the target reads, past the draft's own last position too."""
    has = _positions(draft)
    if drafter.method is not DraftMethod.DRAFT_MODEL or has is None or longest is None or has >= longest:
        return ""
    return (
        f"the draft model has {has} positions (max_position_embeddings), and a request may take {longest}: "
        "lower engine.maxModelLen, or use another draft"
    )


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
    field = "target_hidden_size" if draft.get("target_hidden_size") else "hidden_size"
    wanted, has = draft.get(field), target.get("hidden_size")
    if drafter.method is not DraftMethod.EAGLE or wanted is None or has is None or wanted == has:
        return ""
    return f"the EAGLE-3 head reads hidden states of width {wanted} ({field}), the target's are {has} wide"


def _wrong_layers(drafter: Drafter, draft: dict[str, Any], target: dict[str, Any]) -> str:
    own = draft.get("eagle_config") or {}  # where NVIDIA's heads keep them
    ids = (own if _LAYER_IDS in own else draft).get(_LAYER_IDS) or []
    layers = target.get("num_hidden_layers")
    beyond = [one for one in ids if layers is not None and not 0 <= one <= layers]
    if drafter.method is not DraftMethod.EAGLE or not beyond:
        return ""
    return f"the EAGLE-3 head reads layer {beyond[0]} ({_LAYER_IDS}), the target has {layers} layers"


def _wrong_draft_vocabulary(drafter: Drafter, draft: dict[str, Any], target: dict[str, Any]) -> str:
    size, most = draft.get("draft_vocab_size"), target.get("vocab_size")
    if drafter.method is not DraftMethod.EAGLE or size is None or most is None or size <= most:
        return ""
    return f"vocabulary mismatch: the head proposes {size} tokens (draft_vocab_size), the target has {most}"
