"""`outrider-simulate`: the controller of the runtime against a simulated engine, for hardware that is not at hand.

`workload` says who asks for what and when, `profiles` what a step costs, `truth` what is accepted, `engine` runs the
steps as vLLM's scheduler would, `policies` are ours and the fixed ones it is compared with, `summary` and `report` say
what came of it. The controller is `outrider_runtime.control`, imported, and sees only what it sees in a pod.
"""
