"""Checks of single settings: their types, addresses, and flags that training cannot live with."""
