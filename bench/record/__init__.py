"""Makes the recordings anew: the real target and the real drafters, once, over real prompts."""
