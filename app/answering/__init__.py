"""Answers questions: retrieval, the prompt, the streamed answer, citations, stored conversations."""
