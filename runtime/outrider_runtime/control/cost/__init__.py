"""Seconds of a step (TurboSpec eq. 2, 3).

model          the equation, and its coefficients as a profile gives them
fit, learned   the coefficients from measurements: the profiler's, and the engine's own steps
observed_times the errors of a profile, learned from each step
step_times     predicted seconds of steps and drafts
"""
