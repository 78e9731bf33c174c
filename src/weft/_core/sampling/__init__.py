"""From logits to token ids: parameters, filters, random streams, recorded figures."""
