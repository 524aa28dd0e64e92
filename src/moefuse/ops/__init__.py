"""What each op is, one page each. A call: check, then select a backend, then run it."""
