"""What simulated peers send and receive, in the bytes of each dialect."""
