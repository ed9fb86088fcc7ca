"""Arithmetic on specs: the six ledgers, plans, levers, search, engine profiles. No tensors, no clock."""
