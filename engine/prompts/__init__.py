"""Prompts: segments, chat templates, token ids, tools, conversations, figures."""
