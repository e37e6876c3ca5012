"""The children that serve: Deployment, Service, ServiceAccount, ConfigMaps and PodDisruptionBudget.

NetworkPolicy and InferencePool are made only where chart or spec request them.
"""
