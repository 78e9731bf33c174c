"""What is said between a server and its clients: addresses, requests, replies and events."""
