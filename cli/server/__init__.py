"""`offspec serve`: the APIs over HTTP, and one engine for many clients."""
