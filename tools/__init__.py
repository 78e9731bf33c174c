"""What the repository writes and checks about itself; no part of the installed package."""
