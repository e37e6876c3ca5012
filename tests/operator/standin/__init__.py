"""A light stand-in for the runtime: it speaks the runtime's state contract, and serves no model.

The operator's tests run it in real pods, under the pod template of production: a service's `engine.env` puts
`standin/bin` first on the PATH, so that the container's command finds these programs. STANDIN_* variables in the
same place choose how it behaves.
"""
