"""The routes, a file a noun; `app` puts them together."""
