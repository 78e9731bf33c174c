"""Storage, the HTTP server, its clients and replicas."""
