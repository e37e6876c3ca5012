"""A real Kubernetes on this machine, Ready in about ten seconds: `python -m tests.cluster up`."""
