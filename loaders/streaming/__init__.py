"""Where weights lie, and how they reach the device that computes with them."""
