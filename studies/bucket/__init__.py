"""What the bucket costs and what it survives, on real processes, beside the collective reducer and torchft."""
