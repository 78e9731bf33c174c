"""Packed, merged and upcast linear weights, and products with them."""
