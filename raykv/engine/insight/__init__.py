"""What is found out about a request for people, while it goes its way."""
