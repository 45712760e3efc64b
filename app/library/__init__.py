"""The documents of a home: discovery, readers, ingest and its queue, the registry, watching, removal, maintenance."""
