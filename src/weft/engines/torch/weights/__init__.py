"""How linear weights lie in memory, and the products with them."""
