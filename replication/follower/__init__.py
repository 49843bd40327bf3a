"""Following writers: facts are received or caught up, and applied in order, each once."""
