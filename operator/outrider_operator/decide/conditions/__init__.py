"""One module per condition (or pair of conditions), and how the status is put together from their verdicts."""
