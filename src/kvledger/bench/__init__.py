"""Measurements: the engine's speed beside the machine's ceiling, and the lesson's claims. Results are frozen values."""
