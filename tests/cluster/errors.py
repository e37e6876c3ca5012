"""What the rig says when it cannot do something."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster cannot be started, or a command to it failed; the message says what to do."""


class NotOurClusterError(ClusterError):
    """An operation on a cluster that this rig did not start (CLUSTER=existing): tests skip with this sentence."""
