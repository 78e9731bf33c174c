"""From logits to token ids: parameters, filters, random streams and log-probabilities."""
