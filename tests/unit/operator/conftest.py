"""The operator's cache, and the pods that it serves from it."""

from __future__ import annotations

import pytest
from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.kinds import DEPLOYMENT, REPLICA_SET, SERVICE

from tests.unit.operator.documents import deployment, document, replica_set


@pytest.fixture
def cache() -> ObjectCache:
    """Empty."""
    return ObjectCache()


@pytest.fixture
def pods(cache: ObjectCache) -> ServingPods:
    """Pods of the service `chat`, whose Deployment and ReplicaSet are in the cache."""
    cache.seen(SERVICE, document("chat", 1, uid="chat"))
    cache.seen(DEPLOYMENT, deployment())
    cache.seen(REPLICA_SET, replica_set())
    return ServingPods(cache)
