"""The model: finding, converting and loading a checkpoint, its decoder layers, attention, device, and the self-test."""
