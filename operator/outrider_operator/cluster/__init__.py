"""Objects on the API server: requests, cache, apply, the Lease, and which pods serve."""
