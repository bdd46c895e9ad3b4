"""Who takes part, and the mean of their deltas."""
