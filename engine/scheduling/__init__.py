"""Scheduling: the device queue, background tasks, and recovery from device failures."""
