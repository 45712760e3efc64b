"""What a prompt is made of: segments, the chat template, token ids, tools, conversations, figures."""
