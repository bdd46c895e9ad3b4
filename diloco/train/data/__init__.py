"""From documents to batches: text, tokens, the corpus on disk, the order of training."""
