"""Reading what Gym answers: JSON, model calls, texts, rewards, and what comes of them."""
