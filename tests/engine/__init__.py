"""The plugin inside real vLLM with the real model; marker `model`."""
