"""vLLM's real engine core, stock and with the loop in its scheduler, on the replay's device and its virtual clock."""
