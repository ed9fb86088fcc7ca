"""Executors: they turn a Step into a StepResult. One computes on the CPU, one predicts."""
