"""The one scheduler, for engine and simulation: sequences, policies, steps. No clock, no tensors, no text."""
