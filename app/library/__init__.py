"""Documents: finding, reading and cutting files, the registry of what was read, the queue, watching, removal."""
