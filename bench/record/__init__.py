"""Makes the recordings: the real target and the real drafters, once, over real prompts."""
