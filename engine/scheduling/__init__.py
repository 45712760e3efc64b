"""Whose turn it is on the device, work in the background, and a device that failed."""
