"""Models whose KV cannot be cached by tokens: full paths, or the model's own cache."""
