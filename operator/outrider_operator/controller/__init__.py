"""Watches, queue and workers. A reconcile observes a service, lets `decide` plan, and carries out the plan."""
