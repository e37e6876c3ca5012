"""`make demo`: one manifest becomes a self-tuning service on a real local Kubernetes."""
