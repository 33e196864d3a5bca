"""Turning requests into text on one machine."""
