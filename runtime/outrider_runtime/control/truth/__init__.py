"""What speculation really buys (`probes`), and what a drafter is worth that is passed over (`explore`)."""
