"""The server: OpenAI's interface over the same conversations, calls and library as the page, and what it needs itself.

`application.build` -> `front` (who may ask) -> `chat` or `library` -> `integrations.calls.Call`, `Conversations`.
"""
