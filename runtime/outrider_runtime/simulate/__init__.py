"""`outrider-simulate`: the runtime's own controller in a simulated engine, for hardware that is not at hand.

- `service_manifest`: the pool, SLO classes and limits of a manifest.
- `simulated_deployment`: that service on hardware whose step times are known (`worlds`).
- `load`: the requests, with their lengths and arrival times.
- `recording`: what real drafters proposed, and how much of it a real target accepted.
- `comparison`: Outrider's policy and others on the same requests (`replay`).
- `report`, `plot`: the results.
"""
