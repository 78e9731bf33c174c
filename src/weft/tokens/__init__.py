"""Between text and token ids: tokenizer, chat templates, the bytes of every token, incremental text."""
