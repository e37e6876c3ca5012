"""Where the figures of the status come from: the pods' state endpoints, or Prometheus."""
