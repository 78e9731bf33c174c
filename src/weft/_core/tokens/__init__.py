"""Between text and token ids: tokenizer, chat templates, byte vocabulary, incremental text."""
