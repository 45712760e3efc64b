"""Policies: which rows of a prompt are computed again."""
