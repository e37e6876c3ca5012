"""Step times of a target with its drafters on one kind of hardware, measured by others or here.

- `tables`: times of one model's forward pass.
- `world`: times of a target and its drafters.
- `compose`: makes a world from NVIDIA's measured kernels.
- `profiled`, `coefficients`: make a world from what `outrider-profile` measured.
- `named_models`, `shapes`: layer counts and widths of the models whose worlds are composed.
"""
