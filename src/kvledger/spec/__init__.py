"""Pure frozen facts: model, KV layout, device, step, sampling, configuration. Standard library only."""
