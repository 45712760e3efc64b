"""Questions: passages found, the context, the answer as it comes, its citations, conversations that are kept."""
