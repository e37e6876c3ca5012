"""What passes between an engine and the core: `batch` and `forest` come in, `plans` go out, outcomes come back."""
