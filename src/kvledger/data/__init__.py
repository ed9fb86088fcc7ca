"""Rows of facts with source and date: devices, models, prices."""
