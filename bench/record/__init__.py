"""Recordings of the real target and the real drafters over real prompts."""
