"""What Outrider sets in a pod, a user cannot set: the rules know every name."""

from __future__ import annotations

from outrider_crds.engine_rules import RESERVED_ENV, RESERVED_ENV_PREFIX
from outrider_crds.manifest import load_manifest
from outrider_operator.decide.pod_spec.container import environment

from tests import corpus


def test_every_variable_of_a_pod_is_reserved() -> None:
    """A variable that the operator adds without telling the rules could be overridden from the manifest."""
    ours = {variable["name"] for variable in environment(load_manifest(corpus.good()["least"]).spec)}
    assert ours, "the operator sets at least HOME"
    unprotected = {name for name in ours if name not in RESERVED_ENV and not name.startswith(RESERVED_ENV_PREFIX)}
    assert unprotected == set()
