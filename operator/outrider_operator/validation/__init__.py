"""Validation: all input from outside the operator becomes a bounded value of a known type here. No I/O.

One module per source: `objects` (API server) and `reports` (answers of pods, results of profiling Jobs, series in
Prometheus). Input from a tenant never raises: it becomes a value or an `InvalidInput`.
Samples that do not fit are left out. Metadata that the API server guarantees is used as it is. `reading` reads fields
of Kubernetes objects and treats a wrong type as an absent value.
"""
