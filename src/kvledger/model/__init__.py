"""Layers, and one small file per architecture with only its differences."""
