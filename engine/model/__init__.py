"""A checkpoint on a device: finding, converting and loading it, its parts, its attention, and the gate it must pass."""
