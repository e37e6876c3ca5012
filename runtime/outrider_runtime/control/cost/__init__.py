"""What a step takes (TurboSpec eq. 2, 3).

model          the form, and its coefficients as a profile has them
fit, learned   its coefficients from measurements: the profiler's, and the engine's own steps
observed_times what a profile gets wrong, learned from each step
step_times     predictions of what steps and drafts take
"""
