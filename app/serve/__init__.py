"""The HTTP server: OpenAI's API over the same conversations and library as the page, and its keys and limits.

`application.build` -> `front` (access checks) -> `chat` or `library` -> `integrations.calls.Call`, `Conversations`.
"""
