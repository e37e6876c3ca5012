"""The drafters that this engine runs, one module each."""
