"""From logits to token ids: parameters, filters, random streams, and the figures recorded on the way."""
