"""Conditions of a service, one module for each or for a pair, and the status that is built from their verdicts."""
