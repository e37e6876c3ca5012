"""Metrics of the operator itself, and of the services that it manages."""
