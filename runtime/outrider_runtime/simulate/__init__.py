"""`outrider-simulate`: the runtime's own controller in a simulated engine, for hardware that is not at hand.

`service` is what the manifest asks for, `deployment` puts it on hardware whose step times are known (`worlds`), `load`
says who asks for what and when, `comparison` runs ours and others on it (`replay`), `report` and `plot` show what came
of it. `recording` holds what real drafters proposed and how far a real target agreed.
"""
