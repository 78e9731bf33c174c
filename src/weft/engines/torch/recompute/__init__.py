"""Models whose KV cannot be held by tokens: whole paths, or from their own cache."""
