"""Metrics of services: polls of the pods' state endpoints, queries to Prometheus, and the figures from both."""
