"""How the embedded model was made: a synthetic corpus, a tokenizer, training, evaluation."""
