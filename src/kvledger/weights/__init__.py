"""Where weights come from and how they are stored: GGUF, safetensors, quantised types."""
