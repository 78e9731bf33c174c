"""Programs that write and check the repository; no part of the installed package."""
