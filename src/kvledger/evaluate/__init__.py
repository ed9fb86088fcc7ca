"""Quality under compression: what a KV type or an arithmetic changes in a model's predictions. Knows no tables."""
