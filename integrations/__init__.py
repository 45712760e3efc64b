"""Adapters between the engine and other libraries; nothing here is imported by `ragblend` itself."""
