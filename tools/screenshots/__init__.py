"""Pictures of every view: a real broker with the mail example and a graph of a thousand tasks."""
