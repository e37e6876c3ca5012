"""Fixtures of the simulator's tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from outrider_runtime.profiler.cost_fit import Fit, Sample, fit
from outrider_runtime.simulate import load
from outrider_runtime.simulate.replay import fitted_profile

MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {name: chat}
spec:
  target: {name: meta-llama/Llama-3.1-8B-Instruct}
  draftPool:
  - {name: head, method: Eagle, eagle: {model: {name: head}}}
  - {name: ngram, method: PromptLookup, promptLookup: {}}
  accelerator: {products: [NVIDIA-H100-80GB-HBM3]}
  sloClasses:
  - {name: tight, tpot: 6ms}
  - {name: loose, tpot: 200ms}
  engine: {maxModelLen: 2048, extraArgs: [--max-num-seqs=16]}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few requests at each rate, two rates."""
    monkeypatch.setattr(load, "LEAST_REQUESTS", 6)
    monkeypatch.setattr(load, "SHARES", (0.05, 0.2))


@functools.cache
def _fit_once(samples: tuple[Sample, ...], settings: tuple[tuple[str, object], ...]) -> Fit:
    return fit(samples, **dict(settings))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal samples of a world are fitted once: each test of the command line would begin with the same fit."""

    def kept(samples: Sequence[Sample], **settings: object) -> Fit:
        return _fit_once(tuple(samples), tuple(settings.items()))

    monkeypatch.setattr(fitted_profile, "fit", kept)
