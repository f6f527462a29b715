"""Made-up worlds that drive the product's state machines through more histories than real ones could."""
