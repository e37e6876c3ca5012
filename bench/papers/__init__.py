"""One-off studies: what a paper reports, held against the simulator or a device."""
