"""The Outrider API: the `SpeculativeService` resource and the documents that operator and runtime exchange.

- `spec`, `status`, `conditions`, `rollout_status`: the resource as users see it (`outrider.dev/v1alpha1`).
- `runtime_config`: what the operator mounts into a pod.
- `profile`: a latency profile, as a Job reports it and a ConfigMap stores it.
- `runtime_state`: what a pod answers at `GET /outrider/state`.
- `generate`: writes the CustomResourceDefinition from the models.
"""
