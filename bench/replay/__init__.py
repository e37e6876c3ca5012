"""`make bench-replay`: every policy replays the same recordings in the same worlds; bars are judged on the pairs."""
