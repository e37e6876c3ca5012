"""The drafters that this engine runs, one a file."""
