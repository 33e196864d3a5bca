"""Measuring. Speeds are ratios or absolute times of one named setup, never a bare number."""
