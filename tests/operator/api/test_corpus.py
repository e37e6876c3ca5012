"""The API server's verdict on each manifest of the corpus; tests/unit/crds has that of `serve -f`."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.manifest import load_manifest

from tests import corpus
from tests.operator.api.apply import ApiServer, Refused

pytestmark = pytest.mark.cluster

_MAPS = ("labels", "annotations", "nodeSelector", "matchLabels", "limits", "requests", "volumeAttributes")

GOOD = corpus.good()
BAD = corpus.bad()


@pytest.mark.parametrize("name", GOOD)
def test_a_good_manifest_is_stored_as_serve_reads_it(apiserver: ApiServer, name: str) -> None:
    """Accepted by both, and every default is the same one."""
    stored = apiserver.dry_run(GOOD[name])
    assert not isinstance(stored, Refused), stored
    assert _said(stored["spec"]) == _said(load_manifest(GOOD[name]).spec.wire())


@pytest.mark.parametrize("name", BAD)
def test_a_bad_manifest_is_refused_with_its_sentence(apiserver: ApiServer, name: str) -> None:
    """`kubectl apply` says which field and what to do."""
    refusal = apiserver.dry_run(BAD[name].text)
    assert isinstance(refusal, Refused)
    assert BAD[name].apiserver in refusal.message


def _said(value: Any) -> Any:
    """`value` without what is empty by default: pydantic writes it, the API server does not."""
    if isinstance(value, list):
        return [_said(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _said(item)
        for key, item in value.items()
        if item != [] and not (item == {} and key in _MAPS) and not (item == "" and key == "value")
    }
