"""Conversations on disk: SQLite, branches, full-text search, export. No Textual here."""
