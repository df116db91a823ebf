"""Other people's doors: each is imported only by who asks for it."""
