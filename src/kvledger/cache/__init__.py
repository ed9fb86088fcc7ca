"""Bookkeeping of blocks: pool, tables, prefix cache, tiers. No tensors."""
