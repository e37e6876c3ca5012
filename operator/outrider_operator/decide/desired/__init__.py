"""What is there of a service, and what should be: its world, revisions, images, the gate of a rollout, profiles."""
