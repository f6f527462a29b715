"""What the double is made of. None of these names exist in TensorRT-LLM."""
