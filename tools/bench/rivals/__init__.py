"""`bench peers`: other task queues and pools beside Taskyard, in one run."""
