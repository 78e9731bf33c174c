"""Recipe of the embedded model: a synthetic corpus, a tokenizer, training, evaluation."""
