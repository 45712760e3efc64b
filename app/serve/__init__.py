"""The HTTP server: OpenAI's, Ollama's and Anthropic's APIs over the page's conversations and library, with API keys.

A request goes through `application.AccessMiddleware` (access checks) to a route: of `chat`, which runs an
`integrations.calls.Call`, or of `library`, which uses the app's `Conversations` and ingest queue.
"""
