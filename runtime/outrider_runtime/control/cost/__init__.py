"""What a step takes (TurboSpec eq. 2, 3).

model         the form, and its coefficients as a profile has them
fit, learned  its coefficients from measurements: the profiler's, and the engine's own steps
correction    what the profile gets wrong, learned online
latency       learns from each step
step_times    what steps and drafts take as believed now
"""
