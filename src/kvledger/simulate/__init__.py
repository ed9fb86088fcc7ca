"""Workloads and traces over predicted time."""
