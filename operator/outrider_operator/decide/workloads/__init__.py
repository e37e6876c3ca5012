"""The children that serve: Deployment, Service, ServiceAccount, ConfigMaps and PodDisruptionBudget."""
