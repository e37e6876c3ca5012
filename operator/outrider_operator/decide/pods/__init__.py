"""Pods as their statuses tell: ready, waiting or in trouble; those of Jobs; those that the operator cannot reach."""
