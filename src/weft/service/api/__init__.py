"""Requests, responses and addresses that a server and its clients share."""
