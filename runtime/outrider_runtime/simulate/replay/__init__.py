"""Any policy on the same requests, the same recording and the same world, on a virtual clock: paired, without noise.

`engine` steps as vLLM does: `scheduling` says what runs, `device` runs it. `caches` say what each drafter has read,
`proposals` what it proposes and how much of that the target accepts. `policies` decide.
"""
