"""Workers written from the pages of their dialects; nothing of Taskyard's is imported."""
