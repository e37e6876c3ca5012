"""`make bench-replay`: every policy replays the same recordings in the same worlds, and bars are judged on the pairs."""
